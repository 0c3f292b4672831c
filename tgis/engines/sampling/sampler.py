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
from tgis.engines.sampling.logits_processors import (
    Candidates,
    Filters,
    Penalties,
    Scores,
    SoftmaxStats,
    argmax_lowest_id,
)
from tgis.engines.sampling.logprobs import (
    ChosenTokens,
    HostTable,
    LogprobRequest,
    LogprobTable,
    PendingCopy,
    RowState,
    any_requested,
    initial_num_candidates,
    logprob_table,
    table_with_candidates,
    table_without_candidates,
    token_logprobs,
    token_ranks,
)
from tgis.ipc.request import LogprobOptions, SamplingParams, TokenLogprobs

_INVALID_TOKEN = -1
_TOP_P_CANDIDATES = 116  # best tokens that often hold all that top_p or typical_p alone leave
_DRAW_BLOCK = 256  # tokens
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One step's tokens, one entry per row."""

    tokens: list[int]  # -1 for a bad row
    logprobs: list[TokenLogprobs | None]  # empty when no row asked for any
    invalid: list[int]  # rows whose scores cannot be used
    changed: list[int] = field(default_factory=list)  # rows whose token is another than the draft says


def _splitmix64_mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number in [0, 1) of 53 bits for each pair: output `steps` of splitmix64 started at the mixed seed."""
    bits = _splitmix64_mix(_splitmix64_mix(seeds) + (steps + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _search_cumsum(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of `mass` [b, C] float64 passes `target` [b, 1], and what of it is left there.

    Never a place without mass, whatever the rounding.
    """
    upto, places, some = mass.cumsum(-1), torch.arange(mass.shape[1], device=mass.device), mass > 0
    passed = torch.where(some & (upto > target), places, mass.shape[1]).amin(-1, keepdim=True)
    at = passed.minimum(torch.where(some, places, 0).amax(-1, keepdim=True))
    return at, target - (upto.gather(1, at) - mass.gather(1, at))


def inverse_cdf(mass: Tensor, uniform: Tensor) -> Tensor:
    """The place [b, 1] in the rows of `mass` [b, C] that `uniform` [b, 1] in [0, 1) falls on."""
    size = min(_DRAW_BLOCK, mass.shape[1])
    blocks = pad(mass, (0, -mass.shape[1] % size)).unflatten(1, (-1, size))
    sums = blocks.sum(-1).double()
    block, rest = _search_cumsum(sums, uniform * sums.sum(-1, keepdim=True))
    inside = blocks[torch.arange(len(blocks), device=mass.device), block[:, 0]]
    return block * size + _search_cumsum(inside.double(), rest)[0]


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """What one step brings, for the whole batch."""

    logits: Tensor  # [B, V]
    token_history: Tensor  # [B, W]
    num_generated: Tensor  # [B, 1] float64
    uniform: Tensor  # [B, 1] float64


@dataclass(frozen=True, slots=True)
class _SamplingGroup:
    """Rows that are chosen from in the same way, and what they ask for."""

    indices: list[int]  # in the batch
    selector: Tensor | slice  # the same
    penalties: Penalties
    filters: Filters
    logprob_request: LogprobRequest
    needs_stats: bool  # whether a row has no top_k
    num_candidates: int  # of the list of best tokens

    @classmethod
    def of(cls, rows: list[Sequence], places: list[int], vocabulary: int, eos: Tensor) -> "_SamplingGroup":
        """The group of the `rows` at `places`."""
        samplings = [rows[place].request.sampling_params for place in places]
        details = [_logprob_options(rows[place]) for place in places]
        needed = max(max(s.top_k or _TOP_P_CANDIDATES, d.top_n_tokens) for s, d in zip(samplings, details, strict=True))
        return cls(
            places,
            slice(None) if len(places) == len(rows) else to_device(places, torch.int64, eos.device),
            Penalties(samplings, places, eos),
            Filters.of(samplings, vocabulary, eos.device),
            LogprobRequest.of(details, vocabulary, eos.device),
            any(not 0 < sampling.top_k < vocabulary for sampling in samplings),
            initial_num_candidates(needed, vocabulary),
        )

    def scores(self, step: _StepInputs) -> Scores:
        """The rows' scores after the penalties; those of `step` may be changed in place."""
        values = step.logits[self.selector]
        if self.penalties:
            values = values if values.dtype == torch.float64 else values.float()
            self.penalties.apply(values, step.token_history, step.num_generated[self.selector])
        return Scores(values, values.amax(-1, keepdim=True).float(), self.filters.temperature)


def _argmax(group: _SamplingGroup, step: _StepInputs) -> LogprobTable:
    """The best token, of equal ones that of the lowest id, in the logits' own type."""
    best, tokens = argmax_lowest_id(step.logits[group.selector])
    nothing = torch.zeros_like(tokens)
    return LogprobTable(table_without_candidates(best, ChosenTokens(tokens, nothing, nothing)))


def _sample_greedy(group: _SamplingGroup, step: _StepInputs) -> LogprobTable:
    """The best token after the penalties, and its facts."""
    scores = group.scores(step)
    _, tokens = argmax_lowest_id(scores.values)
    totals = SoftmaxStats.of(scores) if group.logprob_request.logprobs else SoftmaxStats.zeros(scores)
    return logprob_table(scores, totals, tokens, torch.ones_like(tokens), group.logprob_request)


def _sample_full(group: _SamplingGroup, step: _StepInputs) -> LogprobTable:
    """A draw from the whole vocabulary."""
    scores, uniform = group.scores(step), step.uniform[group.selector]
    tokens, totals = [], []
    for rows in scores.row_blocks():
        mass = scores.take(rows).scaled_logits().exp_()
        tokens.append(inverse_cdf(mass, uniform[rows]))
        totals.append(mass.sum(-1, keepdim=True))
    chosen, total = torch.cat(tokens), torch.cat(totals).double()
    rank = token_ranks(scores, chosen) if group.logprob_request.ranks else torch.zeros_like(chosen)
    return logprob_table(scores, SoftmaxStats(total, torch.zeros_like(total)), chosen, rank, group.logprob_request)


def _sample_filtered(group: _SamplingGroup, step: _StepInputs) -> LogprobTable:
    """A draw from what the filters leave."""
    scores, uniform = group.scores(step), step.uniform[group.selector]
    totals = SoftmaxStats.with_entropy(scores) if group.needs_stats else SoftmaxStats.zeros(scores)

    def again(rows: Tensor, length: int) -> Tensor:
        remaining = Candidates.of(scores.take(rows), totals.take(rows), length)
        filters, wishes = group.filters.take(rows), group.logprob_request.take(rows)
        return _sample_candidates(scores.max_score[rows], remaining, filters, uniform[rows], wishes)

    remaining = Candidates.of(scores, totals, group.num_candidates)
    first = _sample_candidates(scores.max_score, remaining, group.filters, uniform, group.logprob_request)
    return LogprobTable(first, group.num_candidates, scores.map_row_blocks(again))


def _sample_candidates(
    best: Tensor, remaining: Candidates, filters: Filters, uniform: Tensor, wishes: LogprobRequest
) -> Tensor:
    """The table of a draw; in the order of ids, which near-equal scores cannot shuffle."""
    remaining.filter(filters)
    order = remaining.order_by_id()
    at = order.gather(1, inverse_cdf(remaining.mass.gather(1, order), uniform))
    logit = remaining.logits.gather(1, at)
    rank = 1 + (remaining.kept & (remaining.logits > logit)).sum(-1, keepdim=True)
    chosen = ChosenTokens(remaining.ids.gather(1, at), logit - remaining.total_mass.log(), rank)
    return table_with_candidates(best, chosen, remaining, wishes)


_Method = Callable[[_SamplingGroup, _StepInputs], LogprobTable]


def _method(sampling: SamplingParams, details: LogprobOptions, vocabulary: int) -> _Method:
    """How the token of a row is chosen."""
    if not sampling.greedy:
        filtered = 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.typical_p < 1
        return _sample_filtered if filtered else _sample_full
    penalised = sampling.repetition_penalty != 1 or sampling.length_penalty or sampling.min_new_tokens
    return _sample_greedy if penalised or any_requested(details) else _argmax


def _logprob_options(row: Sequence) -> LogprobOptions:
    """What is asked about the tokens that the row generates."""
    details = row.request.logprob_options
    return details if details.generated_tokens else LogprobOptions()


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's tokens while they are on the device, and what turns their tables into a choice on the host."""

    seqs: list[Sequence]
    groups: list[_SamplingGroup]
    tables: list[LogprobTable]  # of the groups; their tables are to be fetched
    vocab_size: int

    def token_ids(self) -> Tensor:
        """Those of the rows, int64 [B], and ids even if bad; a row that is not sure may get another."""
        tables = [each.table[:, 0].long().clamp(0, self.vocab_size - 1) for each in self.tables]
        if len(tables) == 1:
            return tables[0]
        tokens = tables[0].new_empty(len(self.seqs))
        for group, some in zip(self.groups, tables, strict=True):
            tokens[group.selector] = some
        return tokens

    def output(self, fetched: list[HostTable]) -> SamplerOutput:
        """The choice, from what `passes` have become."""
        rows: dict[int, list[float]] = {}
        changed: list[int] = []
        for group, one in zip(self.groups, fetched, strict=True):
            rows.update(zip(group.indices, one.rows, strict=True))
            changed += [group.indices[i] for i in one.changed]
        found = [rows[place] for place in range(len(rows))]
        bad = [place for place, row in enumerate(found) if row[1] == RowState.INVALID]
        tokens = [_INVALID_TOKEN if row[1] == RowState.INVALID else int(row[0]) for row in found]
        wishes = [_logprob_options(row) for row in self.seqs]
        if not any(map(any_requested, wishes)):
            return SamplerOutput(tokens, [], bad, changed)
        told = [
            token_logprobs(row, details, self.vocab_size)
            if any_requested(details) and row[1] != RowState.INVALID
            else None
            for row, details in zip(found, wishes, strict=True)
        ]
        return SamplerOutput(tokens, told, bad, changed)


class Sampler:
    """Chooses the next tokens of a batch whose rows seldom change.

    `vocab_size` is the width of the logits; `eos_ids` may be several, and all are masked or boosted.
    """

    def __init__(self, vocab_size: int, eos_ids: Iterable[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        known = sorted({token for token in eos_ids if 0 <= token < vocab_size})
        self._eos = torch.tensor(known, dtype=torch.int64, device=device)
        self.set_seqs([])

    def set_seqs(self, seqs: list[Sequence]) -> None:
        """Choose for these rows from now on; `choose` reads how many tokens each has generated."""
        self._seqs = list(seqs)
        self._seeds = np.array([row.request.sampling_params.seed for row in seqs], dtype=np.uint64)
        places: dict[_Method, list[int]] = {}
        for place, row in enumerate(seqs):
            way = _method(row.request.sampling_params, _logprob_options(row), self._vocab_size)
            places.setdefault(way, []).append(place)
        self._groups = {
            way: _SamplingGroup.of(self._seqs, some, self._vocab_size, self._eos) for way, some in places.items()
        }

    def step_metadata(self, lookahead: int = 0) -> NDArray[np.float64]:
        """What a step needs to know of the rows when they have `ahead` more tokens: how many they have generated then,
        and what they draw by; [2, B].
        """
        generated = np.array([row.num_generated_tokens + lookahead for row in self._seqs], dtype=np.uint64)
        return np.stack([generated.astype(np.float64), uniforms(self._seeds, generated)])

    def sample(self, logits: Tensor, token_history: Tensor, step_metadata: Tensor) -> SampledTokens:
        """One token per row from `logits` [B, V] of any float type, which may be overwritten.

        `context` [B, W] int64 holds the ids that a repetition penalty applies to, repeated at will; `numbers` are those
        of the method on the device. Nothing here waits for it.
        """
        assert logits.shape == (len(self._seqs), self._vocab_size)
        columns = step_metadata[:, :, None]
        step = _StepInputs(logits, token_history, columns[0], columns[1])
        passes = [way(group, step) for way, group in self._groups.items()]
        return SampledTokens(self._seqs, list(self._groups.values()), passes, self._vocab_size)

    def sample_and_wait(self, logits: Tensor, token_history: Tensor) -> SamplerOutput:
        """The same, once it is on the host."""
        with torch.inference_mode():
            draft = self.sample(logits, token_history, to_device(self.step_metadata(), torch.float64, self._device))
            return draft.output(PendingCopy(draft.tables).wait())
