"""How often what was expected came, by its kind: the length of a match, or the place in a draft."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

_KINDS = 7  # matches of 1, 2-3, 4-7, ..., 32 tokens and more, by the bits of the length
_PLACES = 16  # in a draft; those behind them count as the last
_MEMORY = 0.99  # of all sequences: about the last hundred tokens
_SHORT_MEMORY = 0.95  # of one sequence
_DRIFT = 1 / 4096  # of the way to a half, in a step that tries nothing
_PRIOR = 4.0  # tokens of a sequence that count as much as those of all


def kind_of_match(length: int) -> int:
    return min(length.bit_length(), _KINDS) - 1


class Chances:
    """Moving averages, of all sequences or of one."""

    def __init__(self, *, few: bool = False) -> None:
        """With `few` of one sequence; at first all sequences together are right half of the time."""
        self._memory = _SHORT_MEMORY if few else _MEMORY
        self._tries = [0.0 if few else 2.0] * max(_KINDS, _PLACES)
        self._hits = [0.0 if few else 1.0] * max(_KINDS, _PLACES)

    def add(self, kind: int, hit: bool) -> None:
        self._tries[kind] = self._tries[kind] * self._memory + 1
        self._hits[kind] = self._hits[kind] * self._memory + hit

    def mixed(self, kind: int, shared: "Chances") -> float:
        """The chance in one sequence, which that of all others together stands in for at first."""
        others = shared._hits[kind] / shared._tries[kind]
        return (self._hits[kind] + _PRIOR * others) / (self._tries[kind] + _PRIOR)

    def add_draft(self, drafted: Sequence[int], came: Sequence[int]) -> None:
        """Some tokens were drafted, and one more of those that came was chosen after each that was right."""
        for place, (token, right) in enumerate(zip(drafted, came, strict=False)):
            self.add(min(place, _PLACES - 1), token == right)

    def doubt(self) -> None:
        """Nothing was tried: what was wrong once is slowly forgotten, or it would never be tried again."""
        for place, tries in enumerate(self._tries):
            self._hits[place] += (tries / 2 - self._hits[place]) * _DRIFT

    def survival_of_draft(self, shared: "Chances", most: int) -> list[float]:
        """The chances that the first, the first two, ... of the next draft's tokens are right, up to `most`."""
        chances = (self.mixed(min(place, _PLACES - 1), shared) for place in range(most))
        return list(accumulate(chances, mul))
