"""The operations of sampling over whole vocabularies, and the fastest implementation of each for a device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.sampling import CpuArgmax, CpuGumbelMax
from tgis.engines.kernels.cuda.self_test import KernelSelfTest, has_kernels
from tgis.engines.sampling.draws import draw, draw_filtered
from tgis.engines.sampling.logits_processors import Filters, Scores, SoftmaxStats
from tgis.engines.sampling.logprobs import ChosenTokens, LogprobRequest, table_without_candidates

Draw = Callable[[Scores, Tensor], Tensor]  # noise keys [b, 1] -> token ids [b, 1]
DrawFiltered = Callable[[Scores, SoftmaxStats, Filters, Tensor, LogprobRequest, int], Tensor]

_MAX_OTHER_DRAWS = 0.02  # share of tokens that near ties may change


class BestTokens(Protocol):
    """Finds the best token of each row of `values` [b, V], of equal ones the lowest id."""

    def __call__(self, values: Tensor, *, details: bool) -> Tensor:
        """The table of the tokens; logprobs and ranks are 0 unless `details` are wanted."""


def best_tokens(values: Tensor, *, details: bool) -> Tensor:
    """`BestTokens` in plain PyTorch."""
    token_ids = values.argmax(-1, keepdim=True)  # the first of equal ones
    zeros = torch.zeros_like(token_ids)
    table = table_without_candidates(values.gather(1, token_ids), ChosenTokens(token_ids, zeros, zeros))
    return _with_details(table, values) if details else table


def _with_details(table: Tensor, values: Tensor) -> Tensor:
    """The table with the logprobs and ranks of the best tokens filled in."""
    ones = torch.ones_like(table[:, :1])
    scores = Scores(values, values.gather(1, table[:, :1].long()).float(), ones)
    return torch.cat([table[:, :2], -SoftmaxStats.of(scores).mass.log(), ones, table[:, 4:]], -1)


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


def _draw_filtered_on_gpu(
    self_test: KernelSelfTest,
    scores: Scores,
    stats: SoftmaxStats,
    filters: Filters,
    keys: Tensor,
    request: LogprobRequest,
    num_candidates: int,
) -> Tensor:
    arguments = scores, stats, filters, keys, request, num_candidates
    is_double = scores.values.dtype == torch.float64
    if is_double or filters.typical_p is not None or request.max_top > num_candidates:
        return draw_filtered(*arguments)
    kind = num_candidates, filters.top_k is None, filters.top_p is None
    return self_test.run(kind, _triton_draw_filtered, draw_filtered, torch.clone, *arguments)


def _triton_draw_filtered(
    scores: Scores, stats: SoftmaxStats, filters: Filters, keys: Tensor, request: LogprobRequest, num_candidates: int
) -> Tensor:
    from tgis.engines.kernels.cuda.sampling import filtered_draw_table  # noqa: PLC0415 - as above

    values, ids = scores.values.topk(num_candidates)
    columns = scores.max_score, scores.temperature, stats.mass, keys, request.top_n
    filtering = filters.top_k, filters.top_p, request.max_top
    return filtered_draw_table((values.float(), ids), scores.values.shape[1], columns, *filtering)
