"""The share of an engine's time that goes to prefills while other sequences decode.

Engines that compute whole prompts interleave prefill and decode steps: PrefillInterleaving. Engines with KV blocks add
chunks of prompts to decode steps: PrefillBudget says how many tokens, split_budget of which sequences.
"""

from tgis.batcher.sequence import Sequence, StepPlan

_MIN_CHUNK_TOKENS = 16  # of prompts beside decodes, however much they slow down
_MIN_PREFILL_SHARE = 32  # at least 1/32 of a step's tokens are for prompts, however many sequences decode
_MAX_PROMPT_LOGPROBS_PER_STEP = 512  # tokens of one sequence whose logits are kept
_SMOOTHING = 0.9  # weight of the step times seen before


class PrefillInterleaving:
    """Requests join as soon as there is room, but running sequences keep a third of the time.

    After a prefill they get decode steps for half as long as it took: at least one, at most `max_waiting_tokens`.
    TGIS also waits until several requests can prefill together. That costs more in empty slots than it saves: in
    `tgis simulate`, 64 sequences on two cores, 2 to 4 % of the throughput, and many times the time to first token.
    """

    def __init__(self, max_waiting_tokens: int) -> None:
        self._max_decode_steps = max(max_waiting_tokens, 1)
        self._decode_steps = 0  # since the last prefill
        self._next_prefill_at = 0.0  # when the running sequences have had their share

    def may_prefill(self, num_running: int, now: float) -> bool:
        had_share = self._decode_steps > 0 and now >= self._next_prefill_at
        return not num_running or had_share or self._decode_steps >= self._max_decode_steps

    def step_failed(self, plan: StepPlan) -> None:
        """A failed prefill took time too."""
        if plan.has_prefill:
            self._decode_steps = 0

    def step_succeeded(self, plan: StepPlan, now: float, seconds: float) -> None:
        if plan.has_prefill:
            self._decode_steps = 0
            self._next_prefill_at = now + seconds / 2
        else:
            self._decode_steps += 1


class DecodeTimes:
    """Moving averages of the seconds that a decode step takes, by batch size."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the bit length of the batch size

    def add(self, batch_size: int, seconds: float) -> None:
        known = self._seconds.get(batch_size.bit_length(), seconds)
        self._seconds[batch_size.bit_length()] = _SMOOTHING * known + (1 - _SMOOTHING) * seconds

    def expected(self, batch_size: int) -> float | None:
        """An upper estimate for this batch size; None if no decode step has been seen."""
        if not self._seconds:
            return None
        bits = batch_size.bit_length()
        smaller = [known for known in self._seconds if known <= bits]
        nearest = max(smaller) if smaller else min(self._seconds)
        return self._seconds[nearest] * (1 << max(0, bits - nearest))


class PrefillBudget:
    """The number of prompt tokens in a step beside decodes, so that it takes at most `max_slowdown` times as long.

    It is learnt from the steps: lowered at once after one that took too long, raised slowly while they are quick.
    """

    def __init__(self, max_prefill_tokens: int, max_slowdown: float) -> None:
        self._max_prefill_tokens = max_prefill_tokens
        self._max_slowdown = max_slowdown
        self._chunk_tokens = max(max_prefill_tokens // 8, 2 * _MIN_CHUNK_TOKENS)
        self._decode_times = DecodeTimes()

    def budget(self, seqs: list[Sequence], max_tokens: int) -> int:
        """The number of prompt tokens that the next step may compute: as many as fit if nothing decodes, or if no step
        of decodes alone has been seen yet, as when a batch of requests starts together.
        """
        decoding = sum(seq.decoding for seq in seqs)
        if not decoding or self._decode_times.expected(decoding) is None:
            return max(max_tokens - decoding, 1)
        return max(min(max_tokens - decoding, self._chunk_tokens), max_tokens // _MIN_PREFILL_SHARE, 1)

    def step_succeeded(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that has not been committed yet."""
        chunks = plan.num_prefill_tokens
        num_decodes = len(plan.seqs) - len(chunks)
        if not chunks:
            self._decode_times.add(num_decodes, seconds)
        elif num_decodes and (expected := self._decode_times.expected(num_decodes)):
            self._adapt(sum(chunks), seconds / (self._max_slowdown * expected))

    def _adapt(self, prefill_tokens: int, slowdown_ratio: float) -> None:
        """Adjust to a step that took `slowdown_ratio` times as long as it may."""
        tokens = self._chunk_tokens
        if slowdown_ratio > 1:
            self._chunk_tokens = max(int(tokens / min(slowdown_ratio, 2)), _MIN_CHUNK_TOKENS)
        elif prefill_tokens >= tokens:
            self._chunk_tokens = min(tokens + tokens // 8 + 1, self._max_prefill_tokens)


def split_budget(seqs: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """The sequences of a step, in order, and the number of tokens of each: one for decodes, the budget for prompts.

    Half the budget belongs to the oldest prompt, so that it is done some day. The rest goes to those with the fewest
    tokens left, so that short prompts need not wait for long ones; what remains is the oldest one's again.
    """
    prefilling = [seq for seq in seqs if not seq.decoding]
    if not prefilling:
        return [(seq, 1) for seq in seqs]
    shares: dict[Sequence, int] = {}
    oldest, *others = prefilling
    reserved = min(_max_chunk(oldest), (budget + 1) // 2)
    left = budget - reserved
    for seq in sorted(others, key=lambda seq: seq.num_uncomputed_tokens):
        shares[seq] = min(_max_chunk(seq), left)
        left -= shares[seq]
    shares[oldest] = min(_max_chunk(oldest), reserved + left)
    return [(seq, shares.get(seq, 1)) for seq in seqs if shares.get(seq, 1)]


def _max_chunk(seq: Sequence) -> int:
    """Tokens that a sequence can compute in one step."""
    most = _MAX_PROMPT_LOGPROBS_PER_STEP if seq.request.logprob_options.input_tokens else seq.num_uncomputed_tokens
    return min(seq.num_uncomputed_tokens, most)
