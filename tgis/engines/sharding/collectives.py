"""What ranks agree on, add up and gather over torch.distributed."""

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.collectives import CpuCollectives
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.ipc.messages import EngineOptions


def own_part(x: Tensor, model: PreTrainedModel) -> Tensor:
    """The part of what is there for each head that belongs to this rank, if the model is shared."""
    return x.chunk(dist.get_world_size())[dist.get_rank()] if model.sharding else x


def least_of_ranks(value: int) -> int:
    """The smallest value of all ranks, which must all call this."""
    return _of_ranks(value, dist.ReduceOp.MIN)


def sum_of_ranks(value: int) -> int:
    """The sum of the values of all ranks, which must all call this."""
    return _of_ranks(value, dist.ReduceOp.SUM)


def _of_ranks(value: int, reduce: dist.ReduceOp.RedOpType) -> int:
    if not dist.is_initialized():
        return value
    values = torch.tensor([value], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(values, reduce)
    return int(values.item())


def first_of_ranks(x: Tensor) -> Tensor:
    """The `x` of the first rank, in its place; contiguous. All ranks must call this."""
    if dist.is_initialized():
        dist.broadcast(x, 0)
    return x


def reduces_in_kernels(model: PreTrainedModel) -> bool:
    """Whether calls that reduce can be recorded, if there are any."""
    return model.sharding is None or isinstance(model.sharding.collectives, CpuCollectives)


def collectives_of(
    options: EngineOptions, kernels: CpuKernels | None, dtype: torch.dtype
) -> "TorchCollectives | CpuCollectives":
    """How ranks communicate: on CPUs of one machine through memory that they share."""
    memory = options.shared_memory
    in_memory = kernels is not None and memory is not None and dtype in DTYPES
    if not least_of_ranks(int(in_memory)):  # until all are here, so that none loads before all have seen what is free
        return TorchCollectives()
    assert kernels is not None
    assert memory is not None
    return CpuCollectives(kernels, memory, options.rank, options.num_shards)


class TorchCollectives:
    """What the ranks add up and gather over NCCL or gloo."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the `x` of all ranks, in its place; contiguous."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., size] of each rank -> [..., ranks * size]."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, -1)
