"""Choosing tokens from the scores of whole vocabularies: the best ones, and draws by the Gumbel-max trick. Each way is
here in plain PyTorch, and `select_ops` picks the fastest implementation for a device.

For a draw each token gets exponentially distributed noise E of its own, and the one with the least E / p is drawn,
which is the one with the highest log(p) plus Gumbel noise -log(E): a token of probability p in a share p of all draws.
E is a hash of the row's seed, the number of tokens generated so far, and the token's id: neighbours, order, batch size
and restarts do not matter. Rounding changes a draw only at a near tie; on a walk along the cumulative sum it would move
every boundary between two tokens.

The hash is splitmix64: 64 bits take two multiplications, in C, PyTorch and Triton alike; those of Philox take ten. The
noise is made from 52 of them, so that a token of p = 1e-12 still gets its share; from 24, none below 6e-8 would.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.sampling import CpuArgmax, CpuGumbelMax
from tgis.engines.kernels.cuda.self_test import KernelSelfTest, has_kernels
from tgis.engines.sampling.logits_processors import (
    LONG_LIST,
    Candidates,
    Filters,
    Rows,
    Scores,
    SoftmaxStats,
    first_tokens,
    softmax_mass,
)
from tgis.engines.sampling.logprobs import LogprobRequest, candidate_columns, table_of

_GOLDEN, _FACTOR_1, _FACTOR_2 = (
    unsigned - (1 << 64) for unsigned in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_UNIFORM_BITS = 52
_MAX_CANDIDATES = 256  # candidates of a list on GPUs
_MAX_OTHER_DRAWS = 0.02  # share of tokens that near ties may change on GPUs

Draw = Callable[[Scores, Tensor], Tensor]  # noise keys [b, 1] -> token ids [b, 1]

_Bits = TypeVar("_Bits", Tensor, NDArray[np.int64])  # 64-bit integers, signed or not


def _shift_right(bits: _Bits, count: int) -> _Bits:
    """Shift as if the numbers were unsigned."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: _Bits) -> _Bits:
    """The finalizer of splitmix64."""
    bits = (bits ^ _shift_right(bits, 30)) * _FACTOR_1
    bits = (bits ^ _shift_right(bits, 27)) * _FACTOR_2
    return bits ^ _shift_right(bits, 31)


def noise_keys(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """The states from which splitmix64 makes the noise of tokens 0, 1, ... in a step. Each is output number `steps` of
    another splitmix64 generator, which starts at the mixed seed.
    """
    return _mix(_mix(seeds.view(np.int64)) + (steps + 1) * _GOLDEN)


def exponential_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Exponentially distributed float64 numbers above 0 for token ids; `keys` and `ids` are broadcast."""
    bits = _shift_right(_mix(keys + (ids + 1) * _GOLDEN), 64 - _UNIFORM_BITS)
    uniform = (bits.double() + 0.5) * 0.5**_UNIFORM_BITS
    return uniform.neg_().log1p_().neg_()


def gumbel_max(logits: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """The index [b, 1] that is drawn in each row of `logits` [b, C] float64, -inf for tokens that are left out. Their
    ids are `ids` [b, C] or [C]; `keys` [b, 1] int64.
    """
    return (logits - exponential_noise(keys, ids).log_()).argmax(-1, keepdim=True)


def draw(scores: Scores, keys: Tensor) -> Tensor:
    """Draw token ids [b, 1] from the whole vocabulary with noise keys [b, 1]."""
    ids = torch.arange(scores.values.shape[1], device=keys.device)
    blocks = scores.row_blocks()
    return torch.cat([gumbel_max(scores.take(rows).scaled_logits(torch.float64), ids, keys[rows]) for rows in blocks])


@dataclass(frozen=True, slots=True)
class FilteredRows(Rows):
    """What is drawn from filtered tokens."""

    scores: Scores
    stats: SoftmaxStats
    filters: Filters
    keys: Tensor  # keys of the noise [b, 1]
    request: LogprobRequest


DrawFiltered = Callable[[FilteredRows, int], Tensor]


def draw_filtered(rows: FilteredRows, num_candidates: int) -> Tensor:
    """Draw from the tokens that the filters keep; returns the table of the draws. On CPUs a list of the
    `num_candidates` best tokens is tried first, then a longer one: other devices would be waited for each time.
    """
    values, vocab_size = rows.scores.values, rows.scores.values.shape[1]
    if num_candidates >= vocab_size or not values.is_cpu:
        blocks = [_draw_from_list(rows.take(block), vocab_size) for block in rows.scores.row_blocks()]
        return torch.cat([table for table, _ in blocks])
    table, exact = _draw_from_list(rows, num_candidates)
    if not exact.all():
        inexact = (~exact[:, 0]).nonzero()[:, 0]
        longer = LONG_LIST if num_candidates < LONG_LIST else vocab_size
        table[inexact] = draw_filtered(rows.take(inexact), longer)
    return table


def _draw_from_list(rows: FilteredRows, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The table of draws from the tokens that the filters keep of the best ones, and which rows are exact, [b, 1]."""
    candidates = Candidates.of(rows.scores, rows.stats, num_candidates)
    candidates.filter(rows.filters)
    at = gumbel_max(candidates.logits.masked_fill(~candidates.kept, -torch.inf), candidates.ids, rows.keys)
    logit = candidates.logits.gather(1, at)
    rank = 1 + (candidates.kept & (candidates.logits > logit)).sum(-1, keepdim=True)
    chosen = rows.scores.max_score, candidates.ids.gather(1, at), logit - candidates.total_mass.log(), rank
    listed = candidates.logits, candidates.ids, candidates.kept, candidates.total_mass
    return table_of(*chosen, *candidate_columns(*listed, rows.request)), candidates.exact


class BestTokens(Protocol):
    """Finds the best token of each row of `values` [b, V], of equal ones the lowest id."""

    def __call__(self, values: Tensor, *, details: bool) -> Tensor:
        """The table of the tokens; logprobs and ranks are 0 unless `details` are wanted."""


def best_tokens(values: Tensor, *, details: bool) -> Tensor:
    """`BestTokens` in plain PyTorch."""
    token_ids = values.argmax(-1, keepdim=True)  # the first of equal ones
    zeros = torch.zeros_like(token_ids)
    table = table_of(values.gather(1, token_ids), token_ids, zeros, zeros)
    return _with_details(table, values) if details else table


def _with_details(table: Tensor, values: Tensor) -> Tensor:
    """The table with the logprobs and ranks of the best tokens filled in."""
    ones = torch.ones_like(table[:, :1])
    scores = Scores(values, values.gather(1, table[:, :1].long()).float(), ones)
    return torch.cat([table[:, :2], -softmax_mass(scores).log(), ones, table[:, 4:]], -1)


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """The implementations in use; the defaults are plain PyTorch."""

    best_tokens: BestTokens = best_tokens
    draw: Draw = draw
    draw_filtered: DrawFiltered = draw_filtered


def select_ops(device: torch.device, kernels: CpuKernels | None) -> SamplingOps:
    if kernels is not None:
        return SamplingOps(partial(_best_on_cpu, CpuArgmax(kernels)), partial(_draw_on_cpu, CpuGumbelMax(kernels)))
    if not has_kernels(device):
        return SamplingOps()
    return SamplingOps(
        partial(_best_on_gpu, KernelSelfTest()),
        partial(_draw_on_gpu, KernelSelfTest(_MAX_OTHER_DRAWS)),
        partial(_draw_filtered_on_gpu, KernelSelfTest()),
    )


def _best_on_cpu(kernel: CpuArgmax, values: Tensor, *, details: bool) -> Tensor:
    return (kernel if values.dtype in kernel.functions else best_tokens)(values, details=details)


def _draw_on_cpu(kernel: CpuGumbelMax, scores: Scores, keys: Tensor) -> Tensor:
    if scores.values.dtype not in kernel.functions:
        return draw(scores, keys)
    return kernel(scores.values, scores.max_score, scores.temperature, keys)


def _best_on_gpu(self_test: KernelSelfTest, values: Tensor, *, details: bool) -> Tensor:
    if values.dtype == torch.float64:
        return best_tokens(values, details=details)
    plain = partial(best_tokens, details=False)
    table = self_test.run(values.dtype, _triton_best, plain, torch.Tensor.long, values)
    return _with_details(table, values) if details else table


def _triton_best(values: Tensor) -> Tensor:
    from tgis.engines.kernels.cuda.sampling import best_token_table  # noqa: PLC0415 - needs Triton, which CPUs lack

    return best_token_table(values)


def _draw_on_gpu(self_test: KernelSelfTest, scores: Scores, keys: Tensor) -> Tensor:
    return self_test.run(scores.values.dtype, _triton_draw, draw, torch.clone, scores, keys)


def _triton_draw(scores: Scores, keys: Tensor) -> Tensor:
    from tgis.engines.kernels.cuda.sampling import gumbel_max  # noqa: PLC0415 - as above

    return gumbel_max(scores.values, scores.max_score, scores.temperature, keys)


def _draw_filtered_on_gpu(self_test: KernelSelfTest, rows: FilteredRows, num_candidates: int) -> Tensor:
    filters, is_double = rows.filters, rows.scores.values.dtype == torch.float64
    num_candidates = min(num_candidates, _MAX_CANDIDATES)
    if is_double or filters.typical_p is not None or rows.request.max_top > num_candidates:
        return draw_filtered(rows, num_candidates)
    kind = num_candidates, filters.top_k is None, filters.top_p is None
    return self_test.run(kind, _triton_draw_filtered, draw_filtered, torch.clone, rows, num_candidates)


def _triton_draw_filtered(rows: FilteredRows, num_candidates: int) -> Tensor:
    from tgis.engines.kernels.cuda.sampling import filtered_draw_table  # noqa: PLC0415 - as above

    scores, request = rows.scores, rows.request
    values, ids = (
        first_tokens(scores, num_candidates, request.top_n) if request.max_top else scores.values.topk(num_candidates)
    )
    columns = scores.max_score, scores.temperature, rows.stats.mass, rows.keys, request.top_n
    filtering = rows.filters.top_k, rows.filters.top_p, request.max_top
    return filtered_draw_table(scores.values, (values.float(), ids), columns, *filtering)
