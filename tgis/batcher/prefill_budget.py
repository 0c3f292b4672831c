"""Sharing the tokens of one step among rows, for engines that compute prompts in chunks beside rows that decode."""

from tgis.batcher.sequence import Sequence, StepPlan

_MIN_MIXED_PREFILL_TOKENS = 16  # tokens of prompts beside rows that decode, however much they slow down
_MIN_PREFILL_SHARE = 32  # one part in so many of a step's tokens is for prompts, however many rows decode
_MAX_PROMPT_LOGPROBS_PER_STEP = 512  # input tokens of a row whose logits are looked at in one step
_SMOOTHING = 0.9  # of the time that steps used to take


class DecodeTimes:
    """Seconds that a step without prompts takes, by its number of rows, from those seen lately."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the bits of the number

    def add(self, batch_size: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        known = self._seconds.get(batch_size.bit_length(), seconds)
        self._seconds[batch_size.bit_length()] = _SMOOTHING * known + (1 - _SMOOTHING) * seconds

    def expected(self, batch_size: int) -> float | None:
        """What is expected of so many rows, rather too long than too short; None if nothing has been seen."""
        if not self._seconds:
            return None
        bits = batch_size.bit_length()
        fewer = [known for known in self._seconds if known <= bits]
        nearest = max(fewer) if fewer else min(self._seconds)
        return self._seconds[nearest] * (1 << max(0, bits - nearest))


class PrefillBudget:
    """How many tokens of prompts run beside rows that decode, so that a step takes at most `stretch` times as long.

    It is learnt from the steps: down at once after one that took too long, up slowly while they are quick.
    """

    def __init__(self, max_prefill_tokens: int, max_slowdown: float) -> None:
        self._max_prefill_tokens = max_prefill_tokens
        self._max_slowdown = max_slowdown
        self._mixed_prefill_tokens = max(max_prefill_tokens // 8, 2 * _MIN_MIXED_PREFILL_TOKENS)  # to begin with
        self._step_started_at = 0.0
        self._decode_times = DecodeTimes()
        self._num_decodes = self._num_prefill_tokens = 0  # tokens of the step that runs

    def budget(self, rows: list[Sequence], max_tokens: int) -> int:
        """Tokens of prompts that the next step may compute; `most` in all."""
        decoding = sum(row.decoding for row in rows)
        return (
            max(min(max_tokens - decoding, self._mixed_prefill_tokens), max_tokens // _MIN_PREFILL_SHARE, 1)
            if decoding
            else max_tokens
        )

    def step_started(self, plan: StepPlan, now: float) -> None:
        self._step_started_at = now
        self._num_decodes = len(plan.seqs) - len(plan.num_prefill_tokens)
        self._num_prefill_tokens = sum(plan.num_scheduled_tokens) - self._num_decodes

    def step_succeeded(self, now: float) -> None:
        """It has succeeded."""
        seconds = now - self._step_started_at
        if not self._num_prefill_tokens:
            self._decode_times.add(self._num_decodes, seconds)
        elif self._num_decodes and (usual := self._decode_times.expected(self._num_decodes)):
            self._adapt(seconds / (self._max_slowdown * usual))

    def _adapt(self, slowdown_ratio: float) -> None:
        """To a step that took so many times as long as it may."""
        if slowdown_ratio > 1:
            self._mixed_prefill_tokens = max(
                int(self._mixed_prefill_tokens / min(slowdown_ratio, 2)), _MIN_MIXED_PREFILL_TOKENS
            )
        elif self._num_prefill_tokens >= self._mixed_prefill_tokens:
            self._mixed_prefill_tokens = min(
                self._mixed_prefill_tokens + self._mixed_prefill_tokens // 8 + 1, self._max_prefill_tokens
            )


def split_budget(rows: list[Sequence], budget: int) -> tuple[list[Sequence], list[int]]:
    """Rows of the step and their counts: decodes first, then the prompts.

    Half the budget belongs to the prompt that came first, so that it is done some day; the rest goes to those with
    the fewest tokens to go, so that short ones need not wait for long ones; what is left is the first one's again.
    """
    prefilling = [row for row in rows if not row.decoding]
    if not prefilling:
        return rows, [1] * len(rows)
    shares: dict[Sequence, int] = {}
    first, *others = prefilling
    own = min(_max_chunk(first), (budget + 1) // 2)
    left = budget - own
    for row in sorted(others, key=lambda row: row.num_uncomputed_tokens):
        shares[row] = min(_max_chunk(row), left)
        left -= shares[row]
    shares[first] = min(_max_chunk(first), own + left)
    working = [row for row in rows if shares.get(row, 1)]
    return working, [shares.get(row, 1) for row in working]


def _max_chunk(row: Sequence) -> int:
    """Tokens that a row can compute in one step."""
    return (
        min(row.num_uncomputed_tokens, _MAX_PROMPT_LOGPROBS_PER_STEP)
        if row.request.logprob_options.input_tokens
        else row.num_uncomputed_tokens
    )
