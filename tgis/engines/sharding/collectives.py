"""Collectives of the ranks over torch.distributed."""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.collectives import CpuCollectives
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.ipc.messages import EngineOptions


def own_part(x: Tensor, model: PreTrainedModel) -> Tensor:
    """This rank's part of a tensor by heads; all of it if the model is not sharded."""
    return x.chunk(dist.get_world_size())[dist.get_rank()] if model.sharding else x


def least_of_ranks(value: int) -> int:
    """The smallest value of all ranks; a collective."""
    return _of_ranks(value, dist.ReduceOp.MIN)


def sum_of_ranks(value: int) -> int:
    """The sum of the values of all ranks; a collective."""
    return _of_ranks(value, dist.ReduceOp.SUM)


def _of_ranks(value: int, reduce: dist.ReduceOp.RedOpType) -> int:
    if not dist.is_initialized():
        return value
    values = torch.tensor([value], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(values, reduce)
    return int(values.item())


def first_of_ranks(x: Tensor) -> Tensor:
    """Overwrite `x`, which must be contiguous, with that of the first rank; a collective."""
    if dist.is_initialized():
        dist.broadcast(x, 0)
    return x


def reduces_in_kernels(model: PreTrainedModel) -> bool:
    """Whether a recorded step may have all-reduces, or has none."""
    return model.sharding is None or isinstance(model.sharding.collectives, CpuCollectives)


def collectives_of(
    options: EngineOptions, kernels: CpuKernels | None, dtype: torch.dtype
) -> "TorchCollectives | CpuCollectives":
    """The collectives of a model: through shared memory if all ranks are on CPUs of one machine."""
    memory = options.shared_memory
    in_memory = kernels is not None and memory is not None and dtype in DTYPES
    # Also a barrier: no rank loads before all have measured free memory.
    if not least_of_ranks(int(in_memory)):
        return TorchCollectives()
    assert kernels is not None
    assert memory is not None
    return CpuCollectives(kernels, memory, options.rank, options.num_shards)


class TorchCollectives:
    """Collectives of layers over NCCL or gloo."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Overwrite `x`, which must be contiguous, with the sum of all ranks; on CPUs in their order, while gloo adds
        parts of a tensor in an order that depends on its size.
        """
        if x.device.type == "cpu":
            first, *others = self._parts(x)
            x.copy_(first)
            for part in others:
                x += part
        else:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., size] of each rank -> [..., ranks * size]."""
        return torch.cat(self._parts(x.contiguous()), -1)

    def _parts(self, x: Tensor) -> list[Tensor]:
        """The `x` of each rank, in order."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return parts
