"""What requests want to know about tokens: log-probability, rank and the best candidates.

All facts of some rows are one float64 table, so that a single transfer brings them from the device. Columns:
token, state, logprob, rank, number of candidates, then the ids and the logprobs of the best tokens.
"""

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.engines.kernels.transfers import Download
from tgis.engines.sampling.logits_processors import Remaining, Scores, Totals, column
from tgis.ipc.messages import Details, TokenFacts

_MOST_CANDIDATES = 4  # reported when many tie, in multiples of those asked for
_SHORTEST, _LONGEST = 16, 256  # list of best tokens to begin with
_SPARE = 12  # tokens listed for those that tie with the last one needed
_LONGER = 32  # times, when a list was too short
_MOST_LISTED = 1 << 40  # far beyond any vocabulary, of which a list is always long enough

Again = Callable[[Tensor, int], Tensor]  # rows, length of the list -> their table


class State(enum.IntEnum):
    """Whether a row of a table can be used."""

    SURE = 0
    UNSURE = 1  # the list of the best tokens was too short
    BAD = 2  # the scores are no numbers, or none is left


@dataclass(frozen=True, slots=True)
class Wishes:
    """What some rows want to know."""

    logprobs: bool  # whether any does
    ranks: bool  # whether any does
    top_n: Tensor  # [b, 1] int64
    window: int  # how many of the best tokens hold the candidates of every row

    @classmethod
    def of(cls, rows: Sequence[Details], vocabulary: int, device: torch.device) -> "Wishes":
        """Those of `rows`."""
        top_n = [min(row.top_n, vocabulary) for row in rows]
        window = min((_MOST_CANDIDATES + 1) * max(top_n), vocabulary)
        logprobs, ranks = any(row.logprobs for row in rows), any(row.ranks for row in rows)
        return cls(logprobs, ranks, column(top_n, torch.int64, device), window)

    def take(self, rows: Tensor) -> "Wishes":
        """Those of some of the rows."""
        return Wishes(self.logprobs, self.ranks, self.top_n[rows], self.window)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token of each row and its facts, each [b, 1]."""

    tokens: Tensor
    logprob: Tensor
    rank: Tensor

    def take(self, rows: Tensor) -> "Chosen":
        """Those of some of the rows."""
        return Chosen(self.tokens[rows], self.logprob[rows], self.rank[rows])


@dataclass(frozen=True, slots=True)
class Pass:
    """A table of some rows, and the way to do some of them again with a longer list."""

    table: Tensor
    length: int = 0  # of the list
    again: Again | None = None  # None where all are sure

    def finish(self, rows: list[list[float]]) -> list[int]:
        """Replace the rows of the fetched table that are not sure, until all are; those whose token has changed."""
        likely: dict[int, float] = {}
        length = self.length
        while unsure := [i for i, row in enumerate(rows) if row[1] == State.UNSURE]:
            assert self.again is not None
            assert length < _MOST_LISTED
            length *= _LONGER
            found = self.again(torch.tensor(unsure, device=self.table.device), length).tolist()
            for i, row in zip(unsure, found, strict=True):
                likely.setdefault(i, rows[i][0])
                rows[i] = row
        return [i for i, token in likely.items() if rows[i][0] != token]


@dataclass(frozen=True, slots=True)
class Fetched:
    """The table of a pass on the host."""

    rows: list[list[float]]
    changed: list[int]  # rows that were not sure, and whose token is another than the device's table says


def wanted(details: Details) -> bool:
    """Whether anything is asked for beyond the token itself."""
    return details.logprobs or details.ranks or details.top_n > 0


class Tables:
    """The tables of some passes on their way to the host: one transfer, and one more for each with unsure rows."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self._passes = passes
        self._download = Download(torch.cat([each.table.flatten() for each in passes])) if passes else None

    def wait(self) -> list[Fetched]:
        """All of them, once they are there."""
        numbers = self._download.wait() if self._download else []
        fetched, start = [], 0
        for each in self._passes:
            count, width = each.table.shape
            rows = [numbers[start + i * width : start + (i + 1) * width] for i in range(count)]
            fetched.append(Fetched(rows, each.finish(rows)))
            start += count * width
        return fetched


def list_length(needed: int, vocabulary: int) -> int:
    """How many tokens to list at first, so that it holds `needed` of them and likely those that tie."""
    length = -(-(needed + _SPARE) // _SHORTEST) * _SHORTEST
    return min(length, _LONGEST, vocabulary)


def plain_table(best: Tensor, chosen: Chosen) -> Tensor:
    """The table of rows without candidates; `best` [b, 1] is each row's highest score."""
    return _joined(chosen, _bad(best), torch.zeros_like(chosen.tokens))


def table(best: Tensor, chosen: Chosen, remaining: Remaining, wishes: Wishes) -> Tensor:
    """The table of rows with the candidates among the tokens that are left."""
    last = remaining.ids.shape[1] - 1
    count = remaining.left.sum(-1, keepdim=True)
    first = remaining.left.byte().argmax(-1, keepdim=True)
    nth = (first + wishes.top_n - 1).clamp(0, last)  # what is beyond the last one left is lower
    found = (remaining.left & (remaining.logits >= remaining.logits.gather(1, nth))).sum(-1, keepdim=True)
    sure = remaining.sure & (remaining.closed | (count >= wishes.top_n))
    at = (first + torch.arange(wishes.window, device=first.device)).clamp(max=last)
    logprobs = remaining.logits.gather(1, at) - remaining.total.log()
    state = _bad(best).maximum(State.UNSURE * ~sure)
    return _joined(chosen, state, found, remaining.ids.gather(1, at), logprobs)


def _bad(best: Tensor) -> Tensor:
    return State.BAD * ~best.isfinite()


def _joined(chosen: Chosen, state: Tensor, *others: Tensor) -> Tensor:
    columns = (chosen.tokens, state, chosen.logprob, chosen.rank, *others)
    return torch.cat([each.double() for each in columns], -1)


def rank_of(scores: Scores, tokens: Tensor) -> Tensor:
    """1 + how many tokens have a higher score than those of `tokens`, [b, 1]."""
    values, least = scores.values, scores.values.gather(1, tokens)
    return 1 + torch.cat([(values[rows] > least[rows]).sum(-1, keepdim=True) for rows in scores.blocks()])


def describe(scores: Scores, totals: Totals, tokens: Tensor, rank: Tensor, wishes: Wishes) -> Pass:
    """The facts of `tokens` [b, 1] in rows without filters."""
    logit = (scores.values.gather(1, tokens).double() - scores.best) / scores.temperature
    chosen = Chosen(tokens, logit - totals.mass.log(), rank)

    if wishes.window == 0:
        return Pass(plain_table(scores.best, chosen))

    def again(rows: Tensor, length: int) -> Tensor:
        remaining = Remaining.of(scores.take(rows), totals.take(rows), length)
        return table(scores.best[rows], chosen.take(rows), remaining, wishes.take(rows))

    length = list_length(wishes.window // (_MOST_CANDIDATES + 1), scores.values.shape[1])
    first = table(scores.best, chosen, Remaining.of(scores, totals, length), wishes)
    return Pass(first, length, scores.in_blocks(again))


def facts(row: list[float], details: Details, vocabulary: int) -> TokenFacts:
    """What `details` asks for, of a row of a table."""
    _, _, logprob, rank, found, *best = row
    half = len(best) // 2
    top = list(zip(map(int, best[:half]), best[half:], strict=True))[: int(found)]
    return TokenFacts(
        logprob if details.logprobs else 0.0,
        int(rank) if details.ranks else 0,
        _candidates(top, min(details.top_n, vocabulary), details.logprobs) if details.top_n else [],
    )


def _candidates(best: list[tuple[int, float]], n: int, logprobs: bool) -> list[tuple[int, float]]:
    """At most 4 n of `best`, those with the lowest ids; by logprob if it is wanted, else by id without it."""
    by_id = sorted(best)[: _MOST_CANDIDATES * n]
    if not logprobs:
        return [(token, 0.0) for token, _ in by_id]
    return sorted(by_id, key=lambda candidate: -candidate[1])


def first_input_fact(details: Details) -> TokenFacts:
    """The fact of the first input token: nothing predicts it."""
    return TokenFacts(math.nan if details.logprobs else 0.0)


def input_facts(logits: Tensor, tokens: Sequence[int], details: Details) -> list[TokenFacts]:
    """The facts of input `tokens` [T], each of which the same row of `logits` [T, V] predicts.

    These are raw: no penalty, no temperature. Where they are no numbers, so is the logprob.
    """
    if not tokens or not wanted(details):
        return [TokenFacts() for _ in tokens]
    with torch.inference_mode():
        (fetched,) = Tables([input_pass(logits, tokens, details)]).wait()
    return [facts(row, details, logits.shape[1]) for row in fetched.rows]


def input_pass(logits: Tensor, tokens: Sequence[int], details: Details) -> Pass:
    """The same while it is on the device."""
    best, vocabulary = logits.amax(-1, keepdim=True).float(), logits.shape[1]
    scores = Scores(logits, best, torch.ones_like(best, dtype=torch.float64))
    targets = column(tokens, torch.int64, logits.device)
    wishes = Wishes.of([details] * len(tokens), vocabulary, logits.device)
    totals = Totals.of(scores) if details.logprobs else Totals.unasked(scores)
    rank = rank_of(scores, targets) if details.ranks else torch.zeros_like(targets)
    return describe(scores, totals, targets, rank, wishes)
