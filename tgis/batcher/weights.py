"""What a batch costs in memory, in tokens of context. Knows lengths only, never tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from tgis.batcher.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch."""

    max_batch_size: int
    weight: int  # tokens of context, at the peak
    prefill_tokens: int  # padded tokens of one prefill, unless a single request needs more
    max_padding: float  # share of padding in a prefill; 1 is off
    padded: bool  # rectangular batches: rows x longest, not the sum of lengths


def peak_weight(rows: Iterable[Sequence], padded: bool) -> int:
    """Tokens of context if every row runs to its last allowed token at the same time."""
    finals = [len(row.tokens) + row.remaining for row in rows]
    return len(finals) * max(finals, default=0) if padded else sum(finals)


def prefill_tokens(rows: list[Sequence], padded: bool) -> int:
    """Tokens that a prefill of these rows computes, padding included."""
    pending = [row.pending for row in rows]
    return len(pending) * max(pending, default=0) if padded else sum(pending)


def padding_share(rows: list[Sequence]) -> float:
    """Share of a rectangular prefill that is padding."""
    pending = [row.pending for row in rows]
    area = len(pending) * max(pending, default=0)
    return (area - sum(pending)) / area if area else 0.0
