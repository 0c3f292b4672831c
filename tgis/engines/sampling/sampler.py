"""Samples the next token of every row of one batch after another, and finds the details that were asked for.

There are five methods; rows are grouped by method, so that each pays for its own only.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.base import StepResult
from tgis.engines.host_memory import to_device, upload
from tgis.engines.sampling.draws import FilteredRows, SamplingOps, noise_keys
from tgis.engines.sampling.grammar_masks import apply_grammars
from tgis.engines.sampling.histories import Histories, HistorySlots
from tgis.engines.sampling.logits_processors import Filters, Scores, SoftmaxStats, list_length
from tgis.engines.sampling.logprobs import (
    LogprobRequest,
    PendingCopy,
    Row,
    logprob_table,
    token_logprobs,
)
from tgis.engines.sampling.penalties import Ends, Penalties
from tgis.ipc.messages import FailureKind
from tgis.ipc.request import TokenLogprobs

_TOP_P_CANDIDATES = 116  # usually enough for top_p or typical_p without top_k


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of sampling in one step, for the whole batch."""

    logits: Tensor  # [B, V] of any float dtype; may be overwritten
    histories: Histories
    noise_keys: Tensor  # [B, 1] int64
    ops: SamplingOps


Method = Callable[["SamplingGroup", StepInputs], Tensor]  # the table of the rows


class SamplingGroup:
    """The rows of a batch that are sampled by the same method, and their parameters."""

    def __init__(self, method: Method, seqs: list[Sequence], indices: list[int], vocab_size: int, eos: Ends) -> None:
        """The rows at `indices` of the batch."""
        params = [seqs[index].request.sampling_params for index in indices]
        options = [seqs[index].request.output_details for index in indices]
        needed = [max(p.top_k or _TOP_P_CANDIDATES, o.top_n_tokens) for p, o in zip(params, options, strict=True)]
        is_whole_batch = len(indices) == len(seqs)
        self.method = method
        self.indices = indices
        self.selector = slice(None) if is_whole_batch else to_device(indices, torch.int64, eos.ids.device)
        self.penalties = Penalties(params, indices, eos)
        self.filters = Filters.of(params, vocab_size, eos.ids.device)
        self.logprob_request = LogprobRequest.of(options, vocab_size, eos.ids.device)
        # Without top_k the filters of a row need the mass of the whole vocabulary.
        self.needs_stats = any(not 0 < row.top_k < vocab_size for row in params)
        self.num_candidates = list_length(needed, vocab_size)

    def values(self, step: StepInputs) -> Tensor:
        """The rows' scores after the penalties, [b, V]; the logits may be changed in place."""
        values = step.logits[self.selector]
        if self.penalties:
            values = self.penalties.apply(values, step.histories)
        return values

    def scores(self, step: StepInputs) -> Scores:
        """The rows' scores after the penalties, and what scales them."""
        values = self.values(step)
        return Scores(values, values.amax(-1, keepdim=True).float(), self.filters.temperature)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of one step on the device."""

    seqs: list[Sequence]
    groups: list[SamplingGroup]
    tables: list[Tensor]  # tables by group
    vocab_size: int
    problems: dict[int, str] = field(default_factory=dict)  # problems of grammars, by request id

    def token_ids(self) -> Tensor:
        """The tokens of the sequences, int64 [B]. Invalid rows have some valid id."""
        columns = [table[:, 0].long().clamp(0, self.vocab_size - 1) for table in self.tables]
        if len(columns) == 1:
            return columns[0]
        token_ids = columns[0].new_empty(len(self.seqs))
        for group, column in zip(self.groups, columns, strict=True):
            token_ids[group.selector] = column
        return token_ids

    def rows(self, tables: Iterable[list[Row]]) -> dict[int, Row]:
        """The rows of the tables, once they are on the host, by request id."""
        groups = zip(self.groups, tables, strict=True)
        return {
            self.seqs[index].id: row for group, table in groups for index, row in zip(group.indices, table, strict=True)
        }


def step_result(
    seqs: list[Sequence],
    rows: dict[int, Row],
    problems: dict[int, str],
    prompt_logprobs: dict[int, list[TokenLogprobs]] | None = None,
) -> StepResult:
    """The result of a step for these sequences; rows, and problems of grammars, by request id."""
    result = StepResult([], [], prompt_logprobs or {})
    has_details = any(seq.request.output_details.wants_details for seq in seqs)
    for seq in seqs:
        token, is_invalid, *_ = row = rows[seq.id]
        result.tokens.append([] if is_invalid else [int(token)])
        if has_details:
            details = seq.request.output_details
            reported = details.wants_details and not is_invalid
            result.logprobs.append([token_logprobs(row, details)] if reported else [])
        if seq.id in problems:
            result.failed[seq.id] = FailureKind.GRAMMAR, problems[seq.id]
        elif is_invalid:
            excluding = seq.request.sampling_params.excluding_field
            failure = FailureKind.ERROR, "the model's scores are not finite"
            result.failed[seq.id] = (FailureKind.NOTHING_LEFT, excluding) if excluding else failure
    return result


def _greedy(group: SamplingGroup, step: StepInputs) -> Tensor:
    """The best token in the logits' own dtype, of equal ones the lowest id."""
    if 2 * len(group.indices) > len(step.logits):  # a copy of most rows would take longer than a look at all
        return step.ops.best_tokens(step.logits, details=False)[group.selector]
    return step.ops.best_tokens(step.logits[group.selector], details=False)


def _greedy_penalized(group: SamplingGroup, step: StepInputs) -> Tensor:
    """The best token after the penalties."""
    request = group.logprob_request
    return step.ops.best_tokens(group.values(step), details=request.logprobs or request.ranks)


def _greedy_with_top_n(group: SamplingGroup, step: StepInputs) -> Tensor:
    """The best token after the penalties, and a list of the next best: its sums differ from those above by rounding."""
    scores = group.scores(step)
    token_ids = step.ops.best_tokens(scores.values, details=False)[:, :1].long()
    return logprob_table(scores, token_ids, group.logprob_request)


def _sample_full(group: SamplingGroup, step: StepInputs) -> Tensor:
    """A draw from the whole vocabulary."""
    scores = group.scores(step)
    token_ids = step.ops.draw(scores, step.noise_keys[group.selector])
    return logprob_table(scores, token_ids, group.logprob_request)


def _sample_filtered(group: SamplingGroup, step: StepInputs) -> Tensor:
    """A draw from the tokens that the filters keep."""
    scores, keys = group.scores(step), step.noise_keys[group.selector]
    stats = SoftmaxStats.of(scores) if group.needs_stats else SoftmaxStats.zeros(scores)
    rows = FilteredRows(scores, stats, group.filters, keys, group.logprob_request)
    return step.ops.draw_filtered(rows, group.num_candidates)


def _method(seq: Sequence, vocab_size: int) -> Method:
    params = seq.request.sampling_params
    if not params.greedy:
        filtered = 0 < params.top_k < vocab_size or params.top_p < 1 or params.typical_p < 1
        return _sample_filtered if filtered else _sample_full
    details = seq.request.output_details
    if details.top_n_tokens:
        return _greedy_with_top_n
    penalized = Penalties.used_by(params) or seq.grammar is not None
    return _greedy_penalized if penalized or details.wants_details else _greedy


class BatchSampler:
    """The sampler of an engine. A step is `prepare`, then `sample`. What is on the device stays there: the parameters
    as long as the batch has the same sequences, and token histories, to which new tokens are appended.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
        history_of: Callable[[Sequence], list[int]],
        ops: SamplingOps,
        config_eos_ids: Iterable[int] = (),
        num_forced: int = 0,
    ) -> None:
        """`vocab_size` is the width of the logits. A minimum length excludes all of `eos_ids`; a length penalty boosts
        `config_eos_ids`, if given. A repetition penalty and a watermark apply to the tokens that `history_of` returns,
        those of the output last. No parameter excludes the first `num_forced` tokens of an output.
        """
        self._vocab_size = vocab_size
        self._device = device
        self._history_of, self._num_forced = history_of, num_forced
        self._ops = ops
        ends = [sorted({id_ for id_ in ids if 0 <= id_ < vocab_size}) for ids in (eos_ids, config_eos_ids or eos_ids)]
        self._eos = Ends(*(to_device(ids, torch.int64, device) for ids in ends))
        self._slots = HistorySlots(device)
        self._num_generated = np.empty(0, np.int64)  # tokens of each sequence in the step that is prepared
        self._set_batch([])

    def prepare(self, seqs: list[Sequence], lookahead: int = 0) -> NDArray[np.int64]:
        """The step metadata [rows, B] that `sample` takes on the device: the noise key of each sequence, which is read
        only where tokens are drawn, and `Histories.rows` if there are any. The newest `lookahead` tokens, at most one,
        are on the device only.
        """
        if seqs != self._seqs:
            self._set_batch(seqs)
        self._num_generated = np.array([seq.num_generated_tokens + lookahead for seq in seqs], dtype=np.int64)
        keys = noise_keys(self._seeds, self._num_generated) if self._any_drawn else self._num_generated
        if not self._history_rows:
            return keys[None]
        slots, starts, ends = np.zeros_like(keys), np.zeros_like(keys), np.ones_like(keys)
        with_history = [seqs[row] for row in self._history_rows]
        slots[self._history_rows], ends[self._history_rows] = self._slots.update(with_history, self._history, lookahead)
        starts[self._history_rows] = (ends - self._num_generated)[self._history_rows]
        return np.stack([keys, slots, starts, ends])

    def sample(self, logits: Tensor, step_metadata: Tensor, newest: Tensor | None = None) -> SampledTokens:
        """Sample a token for each sequence from `logits` [B, V], which may be overwritten. `newest` [B] are the last
        tokens if they are on the device only.

        Nothing here waits for the device. The tokens of sequences with a grammar must all be on the host.
        """
        assert logits.shape == (len(self._seqs), self._vocab_size)
        keys, rows = step_metadata[0, :, None], step_metadata[1:]
        if newest is not None and self._history_rows:
            self._slots.append(rows, newest)
        only_eos, problems = apply_grammars(logits, self._seqs, self._grammar_rows)
        histories = Histories(self._num_generated, self._slots.ids, rows, only_eos, self._num_forced)
        step = StepInputs(logits, histories, keys, self._ops)
        tables = [group.method(group, step) for group in self._groups]
        return SampledTokens(self._seqs, self._groups, tables, self._vocab_size, problems)

    def sample_and_wait(self, seqs: list[Sequence], logits: Tensor, order: list[Sequence] | None = None) -> StepResult:
        """Run a whole step for sequences whose tokens are all on the host; the result has their order, or another."""
        with torch.inference_mode():
            (step_metadata,) = upload([self.prepare(seqs)], self._device)
            sampled = self.sample(logits, step_metadata)
            rows = sampled.rows(PendingCopy(sampled.tables).wait())
            return step_result(order or seqs, rows, sampled.problems)

    def release(self, request_ids: Iterable[int]) -> None:
        """Forget the tokens of these requests."""
        self._slots.release(request_ids)

    def _history(self, seq: Sequence) -> list[int]:
        """The tokens that the penalties of a sequence depend on."""
        whole = Penalties.need_prompt(seq.request.sampling_params)
        return self._history_of(seq) if whole else seq.tokens[seq.prompt_length :]

    def _set_batch(self, seqs: list[Sequence]) -> None:
        self._seqs = list(seqs)
        params = [seq.request.sampling_params for seq in seqs]
        self._seeds = np.array([row.seed for row in params], dtype=np.uint64)
        indices = defaultdict[Method, list[int]](list)
        for index, seq in enumerate(seqs):
            indices[_method(seq, self._vocab_size)].append(index)
        vocabulary = self._vocab_size, self._eos
        self._groups = [SamplingGroup(method, self._seqs, rows, *vocabulary) for method, rows in indices.items()]
        self._any_drawn = any(not row.greedy for row in params)
        self._grammar_rows = [index for index, seq in enumerate(seqs) if seq.grammar is not None]
        self._history_rows = [index for index, row in enumerate(params) if Penalties.need_history(row)]
