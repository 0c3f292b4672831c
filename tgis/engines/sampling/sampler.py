"""Chooses the next token of every row of a batch, and says what was asked about it.

There are four ways to choose, and each row pays for its own only. A draw is a function of the row's seed and
of the number of tokens that it has generated: neighbours, order, batch size and restarts do not matter.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from tgis.batcher.sequence import Sequence
from tgis.engines.kernels.transfers import to_device
from tgis.engines.sampling.logits_processors import Filters, Penalties, Remaining, Scores, Totals, best_tokens
from tgis.engines.sampling.logprobs import (
    Chosen,
    Fetched,
    Pass,
    State,
    Tables,
    Wishes,
    describe,
    facts,
    list_length,
    plain_table,
    rank_of,
    table,
    wanted,
)
from tgis.ipc.messages import Details, Sampling, TokenFacts

_NO_TOKEN = -1
_OPEN_FILTER = 116  # best tokens that often hold all that top_p or typical_p alone leave
_DRAW_BLOCK = 256  # tokens
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Choice:
    """One step's tokens, one entry per row."""

    tokens: list[int]  # -1 for a bad row
    facts: list[TokenFacts | None]  # empty when no row asked for any
    bad: list[int]  # rows whose scores cannot be used
    changed: list[int] = field(default_factory=list)  # rows whose token is another than the draft says


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) of 53 bits for each pair: output `steps` of splitmix64 started at the mixed seed."""
    bits = _mixed(_mixed(seeds) + (steps + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _locate(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of `mass` [b, C] float64 passes `target` [b, 1], and what of it is left there.

    Never a place without mass, whatever the rounding.
    """
    upto, places, some = mass.cumsum(-1), torch.arange(mass.shape[1], device=mass.device), mass > 0
    passed = torch.where(some & (upto > target), places, mass.shape[1]).amin(-1, keepdim=True)
    at = passed.minimum(torch.where(some, places, 0).amax(-1, keepdim=True))
    return at, target - (upto.gather(1, at) - mass.gather(1, at))


def draw(mass: Tensor, uniform: Tensor) -> Tensor:
    """The place [b, 1] in the rows of `mass` [b, C] that `uniform` [b, 1] in [0, 1) falls on."""
    size = min(_DRAW_BLOCK, mass.shape[1])
    blocks = pad(mass, (0, -mass.shape[1] % size)).unflatten(1, (-1, size))
    sums = blocks.sum(-1).double()
    block, rest = _locate(sums, uniform * sums.sum(-1, keepdim=True))
    inside = blocks[torch.arange(len(blocks), device=mass.device), block[:, 0]]
    return block * size + _locate(inside.double(), rest)[0]


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step brings, for the whole batch."""

    logits: Tensor  # [B, V]
    context: Tensor  # [B, W]
    generated: Tensor  # [B, 1] float64
    uniform: Tensor  # [B, 1] float64


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are chosen from in the same way, and what they ask for."""

    places: list[int]  # in the batch
    index: Tensor | slice  # the same
    penalties: Penalties
    filters: Filters
    wishes: Wishes
    open: bool  # whether a row has no top_k
    length: int  # of the list of best tokens

    @classmethod
    def of(cls, rows: list[Sequence], places: list[int], vocabulary: int, eos: Tensor) -> "_Group":
        """The group of the `rows` at `places`."""
        samplings = [rows[place].request.sampling for place in places]
        details = [_details(rows[place]) for place in places]
        needed = max(max(s.top_k or _OPEN_FILTER, d.top_n) for s, d in zip(samplings, details, strict=True))
        return cls(
            places,
            slice(None) if len(places) == len(rows) else to_device(places, torch.int64, eos.device),
            Penalties(samplings, places, eos),
            Filters.of(samplings, vocabulary, eos.device),
            Wishes.of(details, vocabulary, eos.device),
            any(not 0 < sampling.top_k < vocabulary for sampling in samplings),
            list_length(needed, vocabulary),
        )

    def scores(self, step: _Step) -> Scores:
        """The rows' scores after the penalties; those of `step` may be changed in place."""
        values = step.logits[self.index]
        if self.penalties:
            values = values if values.dtype == torch.float64 else values.float()
            self.penalties.apply(values, step.context, step.generated[self.index])
        return Scores(values, values.amax(-1, keepdim=True).float(), self.filters.temperature)


def _plain(group: _Group, step: _Step) -> Pass:
    """The best token, of equal ones that of the lowest id, in the logits' own type."""
    best, tokens = best_tokens(step.logits[group.index])
    nothing = torch.zeros_like(tokens)
    return Pass(plain_table(best, Chosen(tokens, nothing, nothing)))


def _greedy(group: _Group, step: _Step) -> Pass:
    """The best token after the penalties, and its facts."""
    scores = group.scores(step)
    _, tokens = best_tokens(scores.values)
    totals = Totals.of(scores) if group.wishes.logprobs else Totals.unasked(scores)
    return describe(scores, totals, tokens, torch.ones_like(tokens), group.wishes)


def _free(group: _Group, step: _Step) -> Pass:
    """A draw from the whole vocabulary."""
    scores, uniform = group.scores(step), step.uniform[group.index]
    tokens, totals = [], []
    for rows in scores.blocks():
        mass = scores.take(rows).logits().exp_()
        tokens.append(draw(mass, uniform[rows]))
        totals.append(mass.sum(-1, keepdim=True))
    chosen, total = torch.cat(tokens), torch.cat(totals).double()
    rank = rank_of(scores, chosen) if group.wishes.ranks else torch.zeros_like(chosen)
    return describe(scores, Totals(total, torch.zeros_like(total)), chosen, rank, group.wishes)


def _filtered(group: _Group, step: _Step) -> Pass:
    """A draw from what the filters leave."""
    scores, uniform = group.scores(step), step.uniform[group.index]
    totals = Totals.with_entropy(scores) if group.open else Totals.unasked(scores)

    def again(rows: Tensor, length: int) -> Tensor:
        remaining = Remaining.of(scores.take(rows), totals.take(rows), length)
        filters, wishes = group.filters.take(rows), group.wishes.take(rows)
        return _drawn(scores.best[rows], remaining, filters, uniform[rows], wishes)

    remaining = Remaining.of(scores, totals, group.length)
    first = _drawn(scores.best, remaining, group.filters, uniform, group.wishes)
    return Pass(first, group.length, scores.in_blocks(again))


def _drawn(best: Tensor, remaining: Remaining, filters: Filters, uniform: Tensor, wishes: Wishes) -> Tensor:
    """The table of a draw; in the order of ids, which near-equal scores cannot shuffle."""
    remaining.filter(filters)
    order = remaining.places_by_id()
    at = order.gather(1, draw(remaining.mass.gather(1, order), uniform))
    logit = remaining.logits.gather(1, at)
    rank = 1 + (remaining.left & (remaining.logits > logit)).sum(-1, keepdim=True)
    chosen = Chosen(remaining.ids.gather(1, at), logit - remaining.total.log(), rank)
    return table(best, chosen, remaining, wishes)


_Way = Callable[[_Group, _Step], Pass]


def _way(sampling: Sampling, details: Details, vocabulary: int) -> _Way:
    """How the token of a row is chosen."""
    if not sampling.greedy:
        filtered = 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.typical_p < 1
        return _filtered if filtered else _free
    penalised = sampling.repetition_penalty != 1 or sampling.length_penalty or sampling.min_new_tokens
    return _greedy if penalised or wanted(details) else _plain


def _details(row: Sequence) -> Details:
    """What is asked about the tokens that the row generates."""
    details = row.request.details
    return details if details.generated else Details()


@dataclass(frozen=True, slots=True)
class Draft:
    """One step's tokens while they are on the device, and what turns their tables into a choice on the host."""

    rows: list[Sequence]
    groups: list[_Group]
    passes: list[Pass]  # of the groups; their tables are to be fetched
    vocabulary: int

    def tokens(self) -> Tensor:
        """Those of the rows, int64 [B], and ids even if bad; a row that is not sure may get another."""
        tables = [each.table[:, 0].long().clamp(0, self.vocabulary - 1) for each in self.passes]
        if len(tables) == 1:
            return tables[0]
        tokens = tables[0].new_empty(len(self.rows))
        for group, some in zip(self.groups, tables, strict=True):
            tokens[group.index] = some
        return tokens

    def choice(self, fetched: list[Fetched]) -> Choice:
        """The choice, from what `passes` have become."""
        rows: dict[int, list[float]] = {}
        changed: list[int] = []
        for group, one in zip(self.groups, fetched, strict=True):
            rows.update(zip(group.places, one.rows, strict=True))
            changed += [group.places[i] for i in one.changed]
        found = [rows[place] for place in range(len(rows))]
        bad = [place for place, row in enumerate(found) if row[1] == State.BAD]
        tokens = [_NO_TOKEN if row[1] == State.BAD else int(row[0]) for row in found]
        wishes = [_details(row) for row in self.rows]
        if not any(map(wanted, wishes)):
            return Choice(tokens, [], bad, changed)
        told = [
            facts(row, details, self.vocabulary) if wanted(details) and row[1] != State.BAD else None
            for row, details in zip(found, wishes, strict=True)
        ]
        return Choice(tokens, told, bad, changed)


class Sampler:
    """Chooses the next tokens of a batch whose rows seldom change.

    `vocab_size` is the width of the logits; `eos_ids` may be several, and all are masked or boosted.
    """

    def __init__(self, vocab_size: int, eos_ids: Iterable[int], device: torch.device) -> None:
        self._vocabulary = vocab_size
        self._device = device
        known = sorted({token for token in eos_ids if 0 <= token < vocab_size})
        self._eos = torch.tensor(known, dtype=torch.int64, device=device)
        self.set_rows([])

    def set_rows(self, rows: list[Sequence]) -> None:
        """Choose for these rows from now on; `choose` reads how many tokens each has generated."""
        self._rows = list(rows)
        self._seeds = np.array([row.request.sampling.seed for row in rows], dtype=np.uint64)
        places: dict[_Way, list[int]] = {}
        for place, row in enumerate(rows):
            way = _way(row.request.sampling, _details(row), self._vocabulary)
            places.setdefault(way, []).append(place)
        self._groups = {way: _Group.of(self._rows, some, self._vocabulary, self._eos) for way, some in places.items()}

    def numbers(self, ahead: int = 0) -> NDArray[np.float64]:
        """What a step needs to know of the rows when they have `ahead` more tokens: how many they have generated then,
        and what they draw by; [2, B].
        """
        generated = np.array([row.generated + ahead for row in self._rows], dtype=np.uint64)
        return np.stack([generated.astype(np.float64), uniforms(self._seeds, generated)])

    def draft(self, logits: Tensor, context: Tensor, numbers: Tensor) -> Draft:
        """One token per row from `logits` [B, V] of any float type, which may be overwritten.

        `context` [B, W] int64 holds the ids that a repetition penalty applies to, repeated at will; `numbers` are those
        of the method on the device. Nothing here waits for it.
        """
        assert logits.shape == (len(self._rows), self._vocabulary)
        columns = numbers[:, :, None]
        step = _Step(logits, context, columns[0], columns[1])
        passes = [way(group, step) for way, group in self._groups.items()]
        return Draft(self._rows, list(self._groups.values()), passes, self._vocabulary)

    def choose(self, logits: Tensor, context: Tensor) -> Choice:
        """The same, once it is on the host."""
        with torch.inference_mode():
            draft = self.draft(logits, context, to_device(self.numbers(), torch.float64, self._device))
            return draft.choice(Tables(draft.passes).wait())
