"""Sharing the tokens of one step among rows, for engines that compute prompts in chunks beside rows that decode."""

from tgis.batcher.sequence import Plan, Sequence

_LEAST_BESIDE = 16  # tokens of prompts beside rows that decode, however much they slow down
_LEAST_SHARE = 32  # one part in so many of a step's tokens is for prompts, however many rows decode
_FACTS_PER_STEP = 512  # input tokens of a row whose logits are looked at in one step
_MEMORY = 0.9  # of the time that steps used to take


class DecodeTimes:
    """Seconds that a step without prompts takes, by its number of rows, from those seen lately."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by the bits of the number

    def add(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        known = self._seconds.get(rows.bit_length(), seconds)
        self._seconds[rows.bit_length()] = _MEMORY * known + (1 - _MEMORY) * seconds

    def of(self, rows: int) -> float | None:
        """What is expected of so many rows, rather too long than too short; None if nothing has been seen."""
        if not self._seconds:
            return None
        bits = rows.bit_length()
        fewer = [known for known in self._seconds if known <= bits]
        nearest = max(fewer) if fewer else min(self._seconds)
        return self._seconds[nearest] * (1 << max(0, bits - nearest))


class ChunkPace:
    """How many tokens of prompts run beside rows that decode, so that a step takes at most `stretch` times as long.

    It is learnt from the steps: down at once after one that took too long, up slowly while they are quick.
    """

    def __init__(self, step_tokens: int, stretch: float) -> None:
        self._step_tokens = step_tokens
        self._stretch = stretch
        self._beside = max(step_tokens // 8, 2 * _LEAST_BESIDE)  # to begin with
        self._begun = 0.0
        self._decode = DecodeTimes()
        self._decoding = self._prompts = 0  # tokens of the step that runs

    def budget(self, rows: list[Sequence], most: int) -> int:
        """Tokens of prompts that the next step may compute; `most` in all."""
        decoding = sum(row.decoding for row in rows)
        return max(min(most - decoding, self._beside), most // _LEAST_SHARE, 1) if decoding else most

    def started(self, plan: Plan | None, now: float) -> None:
        """A step begins."""
        self._begun = now
        if plan is not None:
            self._decoding = len(plan.rows) - len(plan.prompt_counts)
            self._prompts = sum(plan.counts) - self._decoding

    def ended(self, now: float) -> None:
        """It has succeeded."""
        seconds = now - self._begun
        if not self._prompts:
            self._decode.add(self._decoding, seconds)
        elif self._decoding and (usual := self._decode.of(self._decoding)):
            self._adapt(seconds / (self._stretch * usual))

    def _adapt(self, excess: float) -> None:
        """To a step that took so many times as long as it may."""
        if excess > 1:
            self._beside = max(int(self._beside / min(excess, 2)), _LEAST_BESIDE)
        elif self._prompts >= self._beside:
            self._beside = min(self._beside + self._beside // 8 + 1, self._step_tokens)


def share_out(rows: list[Sequence], budget: int) -> tuple[list[Sequence], list[int]]:
    """Rows of the step and their counts: decodes first, then the prompts.

    Half the budget belongs to the prompt that came first, so that it is done some day; the rest goes to those with
    the fewest tokens to go, so that short ones need not wait for long ones; what is left is the first one's again.
    """
    catching = [row for row in rows if not row.decoding]
    if not catching:
        return rows, [1] * len(rows)
    shares: dict[Sequence, int] = {}
    first, *others = catching
    own = min(_pending(first), (budget + 1) // 2)
    left = budget - own
    for row in sorted(others, key=lambda row: row.pending):
        shares[row] = min(_pending(row), left)
        left -= shares[row]
    shares[first] = min(_pending(first), own + left)
    working = [row for row in rows if shares.get(row, 1)]
    return working, [shares.get(row, 1) for row in working]


def _pending(row: Sequence) -> int:
    """Tokens that a row can compute in one step."""
    return min(row.pending, _FACTS_PER_STEP) if row.request.details.inputs else row.pending
