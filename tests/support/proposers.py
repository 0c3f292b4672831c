"""Proposers that always propose, in place of the one that weighs what it costs."""

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from tgis.batcher import batcher
from tgis.speculation.lookup import Lookup
from tgis.speculation.policy import Policy
from tgis.speculation.speculator import Speculator


class _Everything(Policy):
    def may_pay(self, _rows: int) -> bool:
        return True

    def step_succeeded(self, rows: int, seconds: float, passes: int = 0) -> None: ...

    def best(
        self, rows: int, cumulative: Sequence[Sequence[float]], drafting: Collection[int] = ()
    ) -> tuple[float, list[int]]:
        counts, left = [], self._max_rows - rows
        for own in cumulative:
            counts.append(min(len(own), left))
            left -= counts[-1]
        return float(bool(drafting)), counts


class ForcedLookups(Speculator):
    """All that lookup expects."""

    def __init__(self, max_tokens: int, max_rows: int, vocab_size: int, *_drafts: int) -> None:
        super().__init__(max_tokens, max_rows, vocab_size)
        self.policy = _Everything(max_rows)


class ForcedDrafts(Speculator):
    """All that a model drafts, and some of what lookup expects."""

    def __init__(self, max_tokens: int, max_rows: int, vocab_size: int, *drafts: int) -> None:
        super().__init__(max_tokens, max_rows, vocab_size, *drafts)
        self.policy, self._draw = _Everything(max_rows), random.Random(max_rows)

    def propose(self, rows: int, lookups: Sequence[tuple[Lookup, int]]) -> Sequence[list[int] | int]:
        if not self._max_drafted:
            return [[] for _ in lookups]
        found, left = list(super().propose(rows, lookups)), self.policy._max_rows - rows
        for at, (_, most) in enumerate(lookups):
            if self._draw.random() < 0.8:
                found[at] = self._draw.randint(1, self._max_drafted)
            own = found[at]
            found[at] = min(own, most, left) if isinstance(own, int) else own[: min(most, left)]
            left -= own if isinstance(own := found[at], int) else len(own)
        return found


class Adversary(Speculator):
    """Garbage, the right tokens, and prefixes of them with garbage behind, at random."""

    right: Sequence[Sequence[int]] = ()  # prompts and their outputs

    def __init__(self, max_tokens: int, max_rows: int, vocab_size: int, *_drafts: int) -> None:
        super().__init__(max_tokens, max_rows, vocab_size)
        self.policy, self._draw, self._free_rows = _Everything(max_rows), random.Random(max_rows), max_rows

    def propose(self, rows: int, lookups: Sequence[tuple[Lookup, int]]) -> list[list[int]]:
        left, found = self._free_rows - rows, []
        for lookup, most in lookups:
            count = min(self._draw.randint(0, self._max_tokens), most, left)
            found.append(self._tokens_after(lookup._tokens, count))
            left -= count
        return found

    def _tokens_after(self, tokens: list[int], count: int) -> list[int]:
        proposed = [self._draw.randrange(min(self._vocab_size, 97)) for _ in range(count)]
        kind = self._draw.random()
        for known in self.right if kind < 0.8 else ():
            if list(known[: len(tokens)]) == tokens:
                right = list(known[len(tokens) :][: count if kind < 0.4 else self._draw.randint(0, count)])
                return right + proposed[len(right) :]
        return proposed


@contextmanager
def proposing(kind: type[Speculator], right: Iterable[Sequence[int]] = ()) -> Iterator[None]:
    """New batchers have a proposer of this kind."""
    with mock.patch.object(batcher, "Speculator", kind), mock.patch.object(Adversary, "right", [*right]):
        yield
