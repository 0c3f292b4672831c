"""Tensor parallelism: which models can be sharded, how the ranks meet, and what they send each other.

Transformers and torch shard the model and do the all-reduces between its layers.
"""

import os

import msgspec
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from tgis.engines.distributed.mirror import StepInput
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions, Shutdown


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """No sequence is held: forget the KV cache, and give unused memory back."""


RankMessage = EngineOptions | StepInput | ClearCache | Shutdown


def check_shardable(config: PreTrainedConfig, num_shards: int) -> None:
    """StartError if the model has no such split, or there are too few GPUs."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if not text.base_model_tp_plan:
        raise StartError(f"NUM_SHARD={num_shards}: transformers has no tensor-parallel plan for {text.model_type}")
    if heads % num_shards or kv_heads % num_shards:
        raise StartError(
            f"NUM_SHARD={num_shards} must divide the model's {heads} attention and {kv_heads} key-value heads"
        )
    if torch.cuda.is_available() and torch.cuda.device_count() < num_shards:
        raise StartError(f"NUM_SHARD={num_shards} is more than the {torch.cuda.device_count()} GPUs")


def init_ranks(rank: int, num_shards: int, store_fd: int) -> None:
    """Join torch's default process group through a file that all ranks have open as `store_fd`.

    All ranks are on this machine: they listen on the loopback interface only.
    """
    os.environ["LOCAL_RANK"] = str(rank)  # transformers picks the GPU by it
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"/proc/self/fd/{store_fd}", num_shards)
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=num_shards, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_shards)


def all_reduce_min(value: int) -> int:
    """The smallest value of all ranks, which must all call this."""
    values = torch.tensor([value], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(values, dist.ReduceOp.MIN)
    return int(values.item())
