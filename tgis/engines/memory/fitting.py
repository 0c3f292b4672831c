"""From peaks of memory to costs: what lies nowhere below a sample. Knows no engine."""

from dataclasses import dataclass
from math import isfinite
from typing import Self

import msgspec


@dataclass(frozen=True, slots=True)
class Sample:
    """The peak of a step in bytes, what the engine holds at rest and the KV cache taken off."""

    rows: int  # that join by a prefill, or all in a decode
    width: int  # tokens of each
    prefill: bool
    peak: int


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What steps take beside keys and values, in bytes."""

    reserve: float  # whatever the lengths: rows, passes and vocabulary at their most
    token: float = 0.0  # of a batch, padding included
    prefill: float = 0.0  # of a prefill; where inputs are computed whole, for each token and token of its row

    @classmethod
    def fitted(cls, short: list[Sample], long: list[Sample], others: list[Sample], power: int) -> Self:
        """`short` and `long` are a prefill of a row and a decode of some, which tell how memory grows with the length.

        A prefill takes memory by that power of the length, a decode in proportion.
        """
        slopes = {a.prefill: _slope(a, b, power if a.prefill else 1) for a, b in zip(short, long, strict=True)}
        costs = cls(0.0, slopes[False], slopes[True])
        beyond = max(sample.peak - costs._growth(sample, power) for sample in [*short, *long, *others])
        return msgspec.structs.replace(costs, reserve=max(0.0, beyond))

    @property
    def sound(self) -> bool:
        """Whether all are numbers that can be."""
        return all(isfinite(value) and value >= 0 for value in msgspec.structs.astuple(self))

    def _growth(self, sample: Sample, power: int) -> float:
        each = self.prefill * sample.width**power if sample.prefill else self.token * sample.width
        return sample.rows * each


def _slope(short: Sample, long: Sample, power: int) -> float:
    growth = float(long.width) ** power - float(short.width) ** power
    return max(0.0, (long.peak - short.peak) / long.rows / growth)
