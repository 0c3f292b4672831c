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
from tgis.engines.sampling.logits_processors import Candidates, Scores, SoftmaxStats, column
from tgis.ipc.request import LogprobOptions, TokenLogprobs

_MAX_TIE_FACTOR = 4  # reported when many tie, in multiples of those asked for
_MIN_CANDIDATES, _MAX_CANDIDATES = 16, 256  # list of best tokens to begin with
_TIE_MARGIN = 12  # tokens listed for those that tie with the last one needed
_RETRY_GROWTH = 32  # times, when a list was too short
_CANDIDATE_LIMIT = 1 << 40  # far beyond any vocabulary, of which a list is always long enough

Retry = Callable[[Tensor, int], Tensor]  # rows, length of the list -> their table


class RowState(enum.IntEnum):
    """Whether a row of a table can be used."""

    EXACT = 0
    INEXACT = 1  # the list of the best tokens was too short
    INVALID = 2  # the scores are no numbers, or none is left


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """What some rows want to know."""

    logprobs: bool  # whether any does
    ranks: bool  # whether any does
    top_n: Tensor  # [b, 1] int64
    max_top: int  # how many of the best tokens hold the candidates of every row

    @classmethod
    def of(cls, rows: Sequence[LogprobOptions], vocabulary: int, device: torch.device) -> "LogprobRequest":
        """Those of `rows`."""
        top_n = [min(row.top_n_tokens, vocabulary) for row in rows]
        window = min((_MAX_TIE_FACTOR + 1) * max(top_n), vocabulary)
        logprobs, ranks = any(row.logprobs for row in rows), any(row.ranks for row in rows)
        return cls(logprobs, ranks, column(top_n, torch.int64, device), window)

    def take(self, rows: Tensor) -> "LogprobRequest":
        """Those of some of the rows."""
        return LogprobRequest(self.logprobs, self.ranks, self.top_n[rows], self.max_top)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """A token of each row and its facts, each [b, 1]."""

    token_ids: Tensor
    logprob: Tensor
    rank: Tensor

    def take(self, rows: Tensor) -> "ChosenTokens":
        """Those of some of the rows."""
        return ChosenTokens(self.token_ids[rows], self.logprob[rows], self.rank[rows])


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """A table of some rows, and the way to do some of them again with a longer list."""

    table: Tensor
    num_candidates: int = 0  # of the list
    retry: Retry | None = None  # None where all are sure

    def resolve(self, rows: list[list[float]]) -> list[int]:
        """Replace the rows of the fetched table that are not sure, until all are; those whose token has changed."""
        likely: dict[int, float] = {}
        length = self.num_candidates
        while unsure := [i for i, row in enumerate(rows) if row[1] == RowState.INEXACT]:
            assert self.retry is not None
            assert length < _CANDIDATE_LIMIT
            length *= _RETRY_GROWTH
            found = self.retry(torch.tensor(unsure, device=self.table.device), length).tolist()
            for i, row in zip(unsure, found, strict=True):
                likely.setdefault(i, rows[i][0])
                rows[i] = row
        return [i for i, token in likely.items() if rows[i][0] != token]


@dataclass(frozen=True, slots=True)
class HostTable:
    """The table of a pass on the host."""

    rows: list[list[float]]
    changed: list[int]  # rows that were not sure, and whose token is another than the device's table says


def any_requested(details: LogprobOptions) -> bool:
    """Whether anything is asked for beyond the token itself."""
    return details.logprobs or details.ranks or details.top_n_tokens > 0


class PendingCopy:
    """The tables of some passes on their way to the host: one transfer, and one more for each with unsure rows."""

    def __init__(self, passes: Sequence[LogprobTable]) -> None:
        self._tables = passes
        self._download = Download(torch.cat([each.table.flatten() for each in passes])) if passes else None

    def wait(self) -> list[HostTable]:
        """All of them, once they are there."""
        numbers = self._download.wait() if self._download else []
        fetched, start = [], 0
        for each in self._tables:
            count, width = each.table.shape
            rows = [numbers[start + i * width : start + (i + 1) * width] for i in range(count)]
            fetched.append(HostTable(rows, each.resolve(rows)))
            start += count * width
        return fetched


def initial_num_candidates(needed: int, vocabulary: int) -> int:
    """How many tokens to list at first, so that it holds `needed` of them and likely those that tie."""
    length = -(-(needed + _TIE_MARGIN) // _MIN_CANDIDATES) * _MIN_CANDIDATES
    return min(length, _MAX_CANDIDATES, vocabulary)


def table_without_candidates(best: Tensor, chosen: ChosenTokens) -> Tensor:
    """The table of rows without candidates; `best` [b, 1] is each row's highest score."""
    return _concat_columns(chosen, _invalid_state(best), torch.zeros_like(chosen.token_ids))


def table_with_candidates(best: Tensor, chosen: ChosenTokens, remaining: Candidates, wishes: LogprobRequest) -> Tensor:
    """The table of rows with the candidates among the tokens that are left."""
    last = remaining.ids.shape[1] - 1
    count = remaining.kept.sum(-1, keepdim=True)
    first = remaining.kept.byte().argmax(-1, keepdim=True)
    nth = (first + wishes.top_n - 1).clamp(0, last)  # what is beyond the last one left is lower
    found = (remaining.kept & (remaining.logits >= remaining.logits.gather(1, nth))).sum(-1, keepdim=True)
    sure = remaining.exact & (remaining.complete | (count >= wishes.top_n))
    at = (first + torch.arange(wishes.max_top, device=first.device)).clamp(max=last)
    logprobs = remaining.logits.gather(1, at) - remaining.total_mass.log()
    state = _invalid_state(best).maximum(RowState.INEXACT * ~sure)
    return _concat_columns(chosen, state, found, remaining.ids.gather(1, at), logprobs)


def _invalid_state(best: Tensor) -> Tensor:
    return RowState.INVALID * ~best.isfinite()


def _concat_columns(chosen: ChosenTokens, state: Tensor, *others: Tensor) -> Tensor:
    columns = (chosen.token_ids, state, chosen.logprob, chosen.rank, *others)
    return torch.cat([each.double() for each in columns], -1)


def token_ranks(scores: Scores, tokens: Tensor) -> Tensor:
    """1 + how many tokens have a higher score than those of `tokens`, [b, 1]."""
    values, least = scores.values, scores.values.gather(1, tokens)
    return 1 + torch.cat([(values[rows] > least[rows]).sum(-1, keepdim=True) for rows in scores.row_blocks()])


def logprob_table(
    scores: Scores, totals: SoftmaxStats, tokens: Tensor, rank: Tensor, wishes: LogprobRequest
) -> LogprobTable:
    """The facts of `tokens` [b, 1] in rows without filters."""
    logit = (scores.values.gather(1, tokens).double() - scores.max_score) / scores.temperature
    chosen = ChosenTokens(tokens, logit - totals.mass.log(), rank)

    if wishes.max_top == 0:
        return LogprobTable(table_without_candidates(scores.max_score, chosen))

    def again(rows: Tensor, length: int) -> Tensor:
        remaining = Candidates.of(scores.take(rows), totals.take(rows), length)
        return table_with_candidates(scores.max_score[rows], chosen.take(rows), remaining, wishes.take(rows))

    length = initial_num_candidates(wishes.max_top // (_MAX_TIE_FACTOR + 1), scores.values.shape[1])
    first = table_with_candidates(scores.max_score, chosen, Candidates.of(scores, totals, length), wishes)
    return LogprobTable(first, length, scores.map_row_blocks(again))


def token_logprobs(row: list[float], details: LogprobOptions, vocabulary: int) -> TokenLogprobs:
    """What `details` asks for, of a row of a table."""
    _, _, logprob, rank, found, *best = row
    half = len(best) // 2
    top = list(zip(map(int, best[:half]), best[half:], strict=True))[: int(found)]
    return TokenLogprobs(
        logprob if details.logprobs else 0.0,
        int(rank) if details.ranks else 0,
        _top_candidates(top, min(details.top_n_tokens, vocabulary), details.logprobs) if details.top_n_tokens else [],
    )


def _top_candidates(best: list[tuple[int, float]], n: int, logprobs: bool) -> list[tuple[int, float]]:
    """At most 4 n of `best`, those with the lowest ids; by logprob if it is wanted, else by id without it."""
    by_id = sorted(best)[: _MAX_TIE_FACTOR * n]
    if not logprobs:
        return [(token, 0.0) for token, _ in by_id]
    return sorted(by_id, key=lambda candidate: -candidate[1])


def first_prompt_logprobs(details: LogprobOptions) -> TokenLogprobs:
    """The fact of the first input token: nothing predicts it."""
    return TokenLogprobs(math.nan if details.logprobs else 0.0)


def prompt_logprobs(logits: Tensor, tokens: Sequence[int], details: LogprobOptions) -> list[TokenLogprobs]:
    """The facts of input `tokens` [T], each of which the same row of `logits` [T, V] predicts.

    These are raw: no penalty, no temperature. Where they are no numbers, so is the logprob.
    """
    if not tokens or not any_requested(details):
        return [TokenLogprobs() for _ in tokens]
    with torch.inference_mode():
        (fetched,) = PendingCopy([prompt_logprob_table(logits, tokens, details)]).wait()
    return [token_logprobs(row, details, logits.shape[1]) for row in fetched.rows]


def prompt_logprob_table(logits: Tensor, tokens: Sequence[int], details: LogprobOptions) -> LogprobTable:
    """The same while it is on the device."""
    best, vocabulary = logits.amax(-1, keepdim=True).float(), logits.shape[1]
    scores = Scores(logits, best, torch.ones_like(best, dtype=torch.float64))
    targets = column(tokens, torch.int64, logits.device)
    wishes = LogprobRequest.of([details] * len(tokens), vocabulary, logits.device)
    totals = SoftmaxStats.of(scores) if details.logprobs else SoftmaxStats.zeros(scores)
    rank = token_ranks(scores, targets) if details.ranks else torch.zeros_like(targets)
    return logprob_table(scores, totals, targets, rank, wishes)
