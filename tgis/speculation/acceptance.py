"""Acceptance rates of proposed tokens, by kind: the length of the match, or the position in a draft."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

_MATCH_KINDS = 7  # matches of 1, 2-3, 4-7, ..., 32 tokens and more, by the bits of the length
_DRAFT_POSITIONS = 16  # later positions share the last rate
_DECAY = 0.99  # weight of the past over all sequences: about the last hundred tokens
_SEQUENCE_DECAY = 0.95
_DRIFT = 1 / 4096  # step towards one half without a draft
_PRIOR_WEIGHT = 4.0  # tokens of a sequence that weigh as much as the rate of all sequences


def kind_of_match(length: int) -> int:
    return min(length.bit_length(), _MATCH_KINDS) - 1


class AcceptanceRates:
    """Moving averages over all sequences, or over one."""

    def __init__(self, *, per_sequence: bool = False) -> None:
        """Rates of all sequences start at one half, those of one sequence at the rates of all."""
        self._decay = _SEQUENCE_DECAY if per_sequence else _DECAY
        self._tries = [0.0 if per_sequence else 2.0] * max(_MATCH_KINDS, _DRAFT_POSITIONS)
        self._hits = [0.0 if per_sequence else 1.0] * max(_MATCH_KINDS, _DRAFT_POSITIONS)

    def add(self, kind: int, hit: bool) -> None:
        self._tries[kind] = self._tries[kind] * self._decay + 1
        self._hits[kind] = self._hits[kind] * self._decay + hit

    def rate(self, kind: int, shared: "AcceptanceRates") -> float:
        """The rate of one sequence, with the rate of all sequences as its prior."""
        prior = shared._hits[kind] / shared._tries[kind]
        return (self._hits[kind] + _PRIOR_WEIGHT * prior) / (self._tries[kind] + _PRIOR_WEIGHT)

    def add_draft(self, drafted: Sequence[int], sampled: Sequence[int]) -> None:
        """Compare drafted tokens with the sampled ones: those accepted, and the one after them."""
        for position, (token, right) in enumerate(zip(drafted, sampled, strict=False)):
            self.add(min(position, _DRAFT_POSITIONS - 1), token == right)

    def decay_to_prior(self) -> None:
        """Drift to one half in a step without a draft: a low rate would never be tried again."""
        for position, tries in enumerate(self._tries):
            self._hits[position] += (tries / 2 - self._hits[position]) * _DRIFT

    def cumulative_of_draft(self, shared: "AcceptanceRates", count: int) -> list[float]:
        """The probabilities that the first, the first two, ... of `count` drafted tokens are accepted."""
        rates = (self.rate(min(position, _DRAFT_POSITIONS - 1), shared) for position in range(count))
        return list(accumulate(rates, mul))
