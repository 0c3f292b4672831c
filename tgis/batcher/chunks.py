"""Sharing the tokens of one step among rows, for engines that compute prompts in chunks beside rows that decode."""

from tgis.batcher.sequence import Sequence

_LEAST_SHARE = 8  # one part in so many of a step's tokens is for prompts, however many rows decode


def chunk_budget(rows: list[Sequence], step_tokens: int) -> int:
    """Tokens of prompts that the next step may compute."""
    decoding = sum(row.decoding for row in rows)
    return max(step_tokens - decoding, step_tokens // _LEAST_SHARE, 1)


def share_out(rows: list[Sequence], budget: int) -> tuple[list[Sequence], list[int]]:
    """Rows of the step and their counts: decodes first, then the prompts.

    Half the budget belongs to the prompt that came first, so that it is done some day; the rest goes to those with
    the fewest tokens to go, so that short ones need not wait for long ones; what is left is the first one's again.
    """
    decoding = [row for row in rows if row.decoding]
    catching = [row for row in rows if not row.decoding]
    counts = {row.id: 1 for row in decoding}
    if catching:
        first, *others = catching
        own = min(first.pending, (budget + 1) // 2)
        left = budget - own
        for row in sorted(others, key=lambda row: row.pending):
            counts[row.id] = min(row.pending, left)
            left -= counts[row.id]
        counts[first.id] = min(first.pending, own + left)
    working = [row for row in rows if counts[row.id]]
    return working, [counts[row.id] for row in working]
