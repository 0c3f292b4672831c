"""Samples the next token of every row of one batch after another, and finds the details that were asked for.

There are five methods; rows are grouped by method, so that each pays for its own only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.base import StepResult
from tgis.engines.host_memory import to_device
from tgis.engines.sampling.draws import FilteredRows, SamplingOps, draw_filtered, noise_keys
from tgis.engines.sampling.grammar_masks import GrammarMasks
from tgis.engines.sampling.histories import Histories, TokenHistory
from tgis.engines.sampling.logits_processors import Filters, Scores, SoftmaxStats
from tgis.engines.sampling.logprobs import (
    LogprobRequest,
    LogprobTable,
    PendingCopy,
    RowState,
    initial_num_candidates,
    logprob_table,
    token_logprobs,
    token_ranks,
)
from tgis.engines.sampling.penalties import Ends, Penalties
from tgis.ipc.messages import FailureKind

_TOP_P_CANDIDATES = 116  # usually enough for top_p or typical_p without top_k

_Lengths = list[tuple[int, int]]  # request id and number of tokens of each sequence


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of sampling in one step, for the whole batch."""

    logits: Tensor  # [B, V] of any float dtype; may be overwritten
    histories: Histories
    noise_keys: Tensor  # [B, 1] int64
    ops: SamplingOps
    masks: GrammarMasks | None = None


Method = Callable[["SamplingGroup", StepInputs], LogprobTable]


class SamplingGroup:
    """The rows of a batch that are sampled by the same method, and their parameters."""

    def __init__(self, method: Method, seqs: list[Sequence], indices: list[int], vocab_size: int, eos: Ends) -> None:
        """The rows are those at `indices` of the batch."""
        params = [seqs[index].request.sampling_params for index in indices]
        options = [seqs[index].request.output_details for index in indices]
        needed = max(max(p.top_k or _TOP_P_CANDIDATES, o.top_n_tokens) for p, o in zip(params, options, strict=True))
        is_whole_batch = len(indices) == len(seqs)
        self.method = method
        self.indices = indices
        self.selector = slice(None) if is_whole_batch else to_device(indices, torch.int64, eos.ids.device)
        self.penalties = Penalties(params, indices, eos)
        self.constrained = any(seqs[index].grammar is not None for index in indices)
        self.filters = Filters.of(params, vocab_size, eos.ids.device)
        self.logprob_request = LogprobRequest.of(options, vocab_size, eos.ids.device)
        # Without top_k the filters of a row need the mass of the whole vocabulary.
        self.needs_stats = any(not 0 < row.top_k < vocab_size for row in params)
        self.num_candidates = initial_num_candidates(needed, vocab_size)

    def values(self, step: StepInputs) -> Tensor:
        """The rows' scores after the penalties, [b, V]; the logits may be changed in place."""
        values = step.logits[self.selector]
        if self.constrained and step.masks:
            values.masked_fill_(step.masks.forbidden[self.selector], -torch.inf)
        if self.penalties:
            values = self.penalties.apply(values, step.histories)
        return values

    def scores(self, step: StepInputs) -> Scores:
        """The rows' scores after the penalties, and what scales them."""
        values = self.values(step)
        return Scores(values, values.amax(-1, keepdim=True).float(), self.filters.temperature)

    def stats(self, scores: Scores) -> SoftmaxStats:
        """The statistics that logprobs of rows without filters need."""
        return SoftmaxStats.of(scores) if self.logprob_request.logprobs else SoftmaxStats.zeros(scores)


def sampling_groups(seqs: list[Sequence], vocab_size: int, eos: Ends) -> list[SamplingGroup]:
    """Group a batch by method."""
    indices: dict[Method, list[int]] = {}
    for index, seq in enumerate(seqs):
        method = _method(seq, vocab_size)
        indices.setdefault(method, []).append(index)
    return [SamplingGroup(method, seqs, own, vocab_size, eos) for method, own in indices.items()]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one step on the device, and the step's result once their tables are on the host."""

    seqs: list[Sequence]
    groups: list[SamplingGroup]
    tables: list[LogprobTable]  # by group
    vocab_size: int
    problems: dict[int, str] = field(default_factory=dict)  # of grammars, by request id

    def token_ids(self) -> Tensor:
        """The tokens of the sequences, int64 [B]. Invalid rows have some valid id; the token of an inexact row may
        change.
        """
        columns = [each.table[:, 0].long().clamp(0, self.vocab_size - 1) for each in self.tables]
        if len(columns) == 1:
            return columns[0]
        token_ids = columns[0].new_empty(len(self.seqs))
        for group, column in zip(self.groups, columns, strict=True):
            token_ids[group.selector] = column
        return token_ids

    def result(self) -> StepResult:
        """The result of the step, once the tables are on the host."""
        rows: dict[int, list[float]] = {}
        for group, table in zip(self.groups, self.tables, strict=True):
            rows.update(zip(group.indices, table.rows, strict=True))
        options = [seq.request.output_details for seq in self.seqs]
        asked = any(own.wants_details for own in options)
        result = StepResult([], [])
        for index, (seq, own) in enumerate(zip(self.seqs, options, strict=True)):
            row = rows[index]
            valid = row[1] != RowState.INVALID
            result.tokens.append([int(row[0])] if valid else [])
            if asked:
                told = valid and own.wants_details
                result.logprobs.append([token_logprobs(row, own)] if told else [])
            if not valid:
                field = seq.request.sampling_params.excluding_field
                failure = FailureKind.ERROR, "the model's scores are not finite"
                result.failed[seq.id] = (FailureKind.NOTHING_LEFT, field) if field else failure
        result.failed |= {seq_id: (FailureKind.GRAMMAR, problem) for seq_id, problem in self.problems.items()}
        return result

    def changed(self) -> list[Sequence]:
        """The sequences whose token is not the one of `token_ids`."""
        pairs = zip(self.groups, self.tables, strict=True)
        return [self.seqs[group.indices[row]] for group, table in pairs for row in table.changed]


def _argmax(group: SamplingGroup, step: StepInputs) -> LogprobTable:
    """The best token in the logits' own dtype, of equal ones the lowest id."""
    return LogprobTable(step.ops.best_tokens(step.logits[group.selector], details=False))


def _sample_greedy(group: SamplingGroup, step: StepInputs) -> LogprobTable:
    """The best token after the penalties."""
    request = group.logprob_request
    return LogprobTable(step.ops.best_tokens(group.values(step), details=request.logprobs or request.ranks))


def _list_greedy(group: SamplingGroup, step: StepInputs) -> LogprobTable:
    """The best token after the penalties, and a list of the next best: its sums differ from those above by rounding."""
    scores = group.scores(step)
    token_ids = step.ops.best_tokens(scores.values, details=False)[:, :1].long()
    return logprob_table(scores, group.stats(scores), token_ids, torch.ones_like(token_ids), group.logprob_request)


def _sample_full(group: SamplingGroup, step: StepInputs) -> LogprobTable:
    """A draw from the whole vocabulary."""
    scores = group.scores(step)
    token_ids = step.ops.draw(scores, step.noise_keys[group.selector])
    rank = token_ranks(scores, token_ids) if group.logprob_request.ranks else torch.zeros_like(token_ids)
    return logprob_table(scores, group.stats(scores), token_ids, rank, group.logprob_request)


def _sample_filtered(group: SamplingGroup, step: StepInputs) -> LogprobTable:
    """A draw from the tokens that the filters keep."""
    scores, keys = group.scores(step), step.noise_keys[group.selector]
    stats = SoftmaxStats.with_entropy(scores) if group.needs_stats else SoftmaxStats.zeros(scores)
    rows, count = FilteredRows(scores, stats, group.filters, keys, group.logprob_request), group.num_candidates

    def retry(some: Tensor, num_candidates: int) -> Tensor:
        return draw_filtered(rows.take(some), num_candidates)

    return LogprobTable(step.ops.draw_filtered(rows, count), count, scores.map_row_blocks(retry))


def _method(seq: Sequence, vocab_size: int) -> Method:
    params = seq.request.sampling_params
    if not params.greedy:
        filtered = 0 < params.top_k < vocab_size or params.top_p < 1 or params.typical_p < 1
        return _sample_filtered if filtered else _sample_full
    details = seq.request.output_details
    if details.top_n_tokens:
        return _list_greedy
    changed = Penalties.used_by(params) or seq.grammar is not None
    return _sample_greedy if changed or details.wants_details else _argmax


class BatchSampler:
    """The sampler of an engine. A step is `prepare`, then `sample`. Consecutive steps of the same sequences reuse what
    is on the device: the parameters, and the token histories, to which the newest tokens are appended.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
        history_of: Callable[[Sequence], list[int]],
        ops: SamplingOps,
        config_eos_ids: Iterable[int] = (),
    ) -> None:
        """`vocab_size` is the width of the logits. A minimum length excludes all of `eos_ids`; a length penalty boosts
        `config_eos_ids`, if given. A repetition penalty and a watermark apply to the tokens that `history_of` returns,
        the newest last.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._history_of = history_of
        self._ops = ops
        ends = [sorted({id_ for id_ in ids if 0 <= id_ < vocab_size}) for ids in (eos_ids, config_eos_ids or eos_ids)]
        self._eos = Ends(*(to_device(ids, torch.int64, device) for ids in ends))
        self._sampled_lengths: _Lengths | None = None  # in the last step; None if the next one must not reuse it
        self._next_lengths: _Lengths = []  # in the step that is prepared
        self._num_generated = np.empty(0, np.int64)  # tokens of each sequence of that step
        self._append_newest = False
        self._set_batch([])

    def prepare(self, seqs: list[Sequence], lookahead: int = 0) -> NDArray[np.int64]:
        """The step metadata [B] that `sample` takes on the device: the noise key of each sequence, which is read only
        where tokens are drawn. The newest `lookahead` tokens, at most one, are on the device only.
        """
        self._next_lengths = [(seq.id, len(seq.tokens) + lookahead) for seq in seqs]
        advanced = self._is_next(self._next_lengths)
        self._sampled_lengths = None  # this step may fail before it is sampled
        if not advanced:
            self._set_batch(seqs)
        self._append_newest = advanced or lookahead > 0
        self._num_generated = np.array([seq.num_generated_tokens + lookahead for seq in seqs], dtype=np.int64)
        return noise_keys(self._seeds, self._num_generated) if self._any_drawn else self._num_generated

    def sample(self, logits: Tensor, newest: Tensor, step_metadata: Tensor) -> SampledTokens:
        """Sample a token for each sequence from `logits` [B, V], which may be overwritten. `newest` [B] are the last
        tokens.

        Nothing here waits for the device. The tokens of sequences with a grammar must all be on the host.
        """
        assert logits.shape == (len(self._seqs), self._vocab_size)
        for history in (self._tokens, self._outputs) if self._append_newest else ():
            if history is not None:
                history.append(newest)
        self._sampled_lengths = self._next_lengths
        masks = GrammarMasks.of(self._seqs, self._vocab_size, self._device)
        histories = Histories(self._tokens, self._outputs, self._num_generated, masks.only_eos if masks else None)
        step = StepInputs(logits, histories, step_metadata[:, None], self._ops, masks)
        tables = [group.method(group, step) for group in self._groups]
        return SampledTokens(self._seqs, self._groups, tables, self._vocab_size, masks.problems if masks else {})

    def sample_and_wait(self, seqs: list[Sequence], logits: Tensor) -> StepResult:
        """Run a whole step for sequences whose tokens are all on the host."""
        with torch.inference_mode():
            step_metadata = to_device(self.prepare(seqs), torch.int64, self._device)
            newest = to_device([seq.tokens[-1] for seq in seqs], torch.int64, self._device)
            sampled = self.sample(logits, newest, step_metadata)
            PendingCopy(sampled.tables).wait()
            return sampled.result()

    def invalidate(self) -> None:
        """Reuse nothing in the next step: a token that was on the device only was replaced on the host."""
        self._sampled_lengths = None

    def _is_next(self, lengths: _Lengths) -> bool:
        last = self._sampled_lengths
        return last is not None and lengths == [(seq_id, length + 1) for seq_id, length in last]

    def _set_batch(self, seqs: list[Sequence]) -> None:
        self._seqs = list(seqs)
        self._seeds = np.array([seq.request.sampling_params.seed for seq in seqs], dtype=np.uint64)
        self._groups = sampling_groups(self._seqs, self._vocab_size, self._eos)
        params = [seq.request.sampling_params for seq in seqs]
        self._any_drawn = any(not each.greedy for each in params)
        needs_tokens, needs_outputs = any(map(Penalties.need_tokens, params)), any(map(Penalties.need_outputs, params))
        outputs = (seq.tokens[seq.prompt_length :] for seq in seqs)
        self._tokens = TokenHistory(map(self._history_of, seqs), self._device) if needs_tokens else None
        self._outputs = TokenHistory(outputs, self._device) if needs_outputs else None
