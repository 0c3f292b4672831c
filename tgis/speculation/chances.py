"""How often what was expected came, by the length of the match."""

_KINDS = 7  # matches of 1, 2-3, 4-7, ..., 32 tokens and more, by the bits of the length
_MEMORY = 0.99  # of all sequences: about the last hundred tokens
_SHORT_MEMORY = 0.95  # of one sequence
_PRIOR = 4.0  # tokens of a sequence that count as much as those of all


def kind_of_match(length: int) -> int:
    return min(length.bit_length(), _KINDS) - 1


class Chances:
    """Moving averages, of all sequences or of one."""

    def __init__(self, *, few: bool = False) -> None:
        """With `few` of one sequence; at first all sequences together are right half of the time."""
        self._memory = _SHORT_MEMORY if few else _MEMORY
        self._tries = [0.0 if few else 2.0] * _KINDS
        self._hits = [0.0 if few else 1.0] * _KINDS

    def add(self, kind: int, hit: bool) -> None:
        self._tries[kind] = self._tries[kind] * self._memory + 1
        self._hits[kind] = self._hits[kind] * self._memory + hit

    def mixed(self, kind: int, shared: "Chances") -> float:
        """The chance in one sequence, which that of all others together stands in for at first."""
        others = shared._hits[kind] / shared._tries[kind]
        return (self._hits[kind] + _PRIOR * others) / (self._tries[kind] + _PRIOR)
