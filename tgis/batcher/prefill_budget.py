"""The share of an engine's time that goes to prefills while other sequences decode.

Engines that compute whole prompts interleave prefill and decode steps: PrefillInterleaving. Engines with KV blocks add
chunks of prompts to decode steps: PrefillBudget says how many tokens, split_budget of which sequences. Encoders with KV
blocks need whole prompts, which split_whole selects.
"""

from tgis.batcher.sequence import Sequence, StepPlan

_MIN_PREFILL_SHARE = 8  # at least 1/8 of a step's tokens are for prompts: with fewer, multipliers idle
# Largest share of a step's tokens in prompts that end with it: if more end together, each ends later.
_ENOUGH_SHARE = 3 / 8
_TARGET_SHARE = 0.8  # share of the longest gap: times vary, and the next tokens of a prompt attend to more
_MAX_PROMPT_LOGPROBS_PER_STEP = 512  # tokens of one sequence whose logits are kept


class PrefillInterleaving:
    """Requests join as soon as there is room, but running sequences keep a third of the time.

    After a prefill they get decode steps for half as long as it took: at least one, at most `max_waiting_tokens`.
    TGIS also waits until several requests can prefill together. That costs more in empty slots than it saves: in
    simulations of 64 sequences on two cores, 2 to 4 % of the throughput, and many times the time to first token.
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


class PrefillBudget:
    """The number of prompt tokens in a step beside decodes: all that wait, if the step takes at most `max_gap_ms`.

    It is learnt from the steps: lowered at once after one that took too long, raised slowly while they are quick.
    """

    def __init__(self, max_prefill_tokens: int, max_gap_ms: int) -> None:
        self._target_seconds = _TARGET_SHARE * max_gap_ms / 1000
        self._chunk_tokens = max_prefill_tokens // _MIN_PREFILL_SHARE

    def budget(self, seqs: list[Sequence], max_tokens: int) -> int:
        """The number of prompt tokens that the next step may compute: as many as fit if nothing decodes."""
        decoding = sum(seq.decoding for seq in seqs)
        most = min(max_tokens - decoding, self._chunk_tokens) if decoding else max_tokens
        return max(most, max_tokens // _MIN_PREFILL_SHARE, 1)

    def step_succeeded(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step that has not been committed yet."""
        tokens = sum(plan.num_prefill_tokens)
        fitting = int(tokens * self._target_seconds / max(seconds, 1e-6))
        if tokens and (fitting < tokens or tokens >= self._chunk_tokens):
            self._chunk_tokens = min(fitting, tokens + tokens // 8 + 1)


def split_budget(seqs: list[Sequence], budget: int, max_tokens: int) -> list[tuple[Sequence, int]]:
    """The sequences of a step, in order, and the number of tokens of each: one for decodes, the budget for prompts.

    Half the budget belongs to the oldest prompt, so that it is done some day. The rest goes to those with the fewest
    tokens left, so that short prompts need not wait for long ones and those of one length are done one after the other;
    last to an oldest prompt that is longer than a step: the more it attends to, the longer its tokens take. When enough
    prompts end with the step, which may have `max_tokens`, the others wait for the next one.
    """
    prefilling = [seq for seq in seqs if not seq.decoding]
    if not prefilling:
        return [(seq, 1) for seq in seqs]
    oldest = prefilling[0]
    is_long = len(oldest.tokens) > max_tokens
    shares = {oldest: min(_max_chunk(oldest), (budget + 1) // 2)}
    left = budget - shares[oldest]
    for seq in sorted(prefilling, key=lambda seq: (seq is oldest and is_long, seq.num_uncomputed_tokens)):
        more = min(_max_chunk(seq) - shares.get(seq, 0), left)
        shares[seq] = shares.get(seq, 0) + more
        left -= more
    ended = 0
    for seq, count in shares.items():
        if ended >= _ENOUGH_SHARE * max_tokens:
            shares[seq] = 0
        elif count == seq.num_uncomputed_tokens:
            ended += count
    return [(seq, shares.get(seq, 1)) for seq in seqs if shares.get(seq, 1)]


def split_whole(seqs: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """The sequences of a step, in order, and the number of tokens of each, where a prompt is computed in one step: one
    for decodes, all of the oldest prompt, and all of others while the budget lasts, the shortest first.
    """
    prefilling = [seq for seq in seqs if not seq.decoding]
    chosen = set(prefilling[:1])
    left = budget - sum(seq.num_uncomputed_tokens for seq in chosen)
    for seq in sorted(prefilling[1:], key=lambda seq: seq.num_uncomputed_tokens):
        left -= seq.num_uncomputed_tokens
        if left >= 0:
            chosen.add(seq)
    return [(seq, seq.num_uncomputed_tokens) for seq in seqs if seq.decoding or seq in chosen]


def _max_chunk(seq: Sequence) -> int:
    """Tokens that a sequence can compute in one step."""
    most = _MAX_PROMPT_LOGPROBS_PER_STEP if seq.request.logprob_options.input_tokens else seq.num_uncomputed_tokens
    return min(seq.num_uncomputed_tokens, most)
