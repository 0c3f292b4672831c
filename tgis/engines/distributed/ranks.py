"""Tensor parallelism: which models can be sharded, how the ranks meet, and what they send each other.

Transformers and torch shard the model and do the all-reduces between its layers.
"""

import os
from typing import Self

import msgspec
import torch
import torch.distributed as dist
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.lora.soft_prompts import flat_spans
from tgis.errors import StartError
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import EngineOptions, Shutdown
from tgis.ipc.request import LogprobOptions, Request
from tgis.prompts.soft_prompt import SoftPrompt


class SeqInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of one sequence in a step: `tokens`, which follow those whose keys and values are in the cache."""

    id: int
    tokens: list[int]
    num_computed_tokens: int
    block_table: list[int]
    prompt_logprobs: bool  # whether the logits of all its tokens are wanted
    soft_prompt: list[bytes] = []  # embeddings of the first tokens as they lie in memory, if a soft prompt stands there

    @classmethod
    def of(cls, seq: Sequence, count: int) -> Self:
        """The input for the next `count` tokens of a sequence."""
        start = seq.num_computed_tokens
        spans = flat_spans([(seq, range(start, start + count))])
        soft_prompt = [token.numpy().tobytes() for span in spans for token in span.embeddings.cpu().view(torch.uint8)]
        tokens = seq.tokens[start : start + count]
        return cls(seq.id, tokens, start, seq.block_table, seq.wants_prompt_logprobs, soft_prompt)

    def to_sequence(self, dtype: torch.dtype) -> Sequence:
        """A sequence that computes the same. Its earlier tokens are placeholders; embeddings have this dtype."""
        soft_length = len(self.soft_prompt)
        request = Request(
            self.id,
            tokens=[0] * self.num_computed_tokens + self.tokens,
            max_new_tokens=1,
            logprob_options=LogprobOptions(input_tokens=self.prompt_logprobs),
            adapter=AdapterRef("", self.num_computed_tokens + soft_length, 0, 0, 0) if soft_length else None,
        )
        seq = Sequence(request, 0.0, num_computed_tokens=self.num_computed_tokens, block_table=self.block_table)
        if soft_length:
            embeddings = torch.frombuffer(bytearray(b"".join(self.soft_prompt)), dtype=dtype).view(soft_length, -1)
            seq.adapter = SoftPrompt(0, pad(embeddings, (0, 0, self.num_computed_tokens, 0)))
        return seq


class StepInput(msgspec.Struct, frozen=True, tag="step"):
    """A plan as it is sent to the other ranks: everything that the logits depend on, and nothing else."""

    seqs: list[SeqInput]
    sampled: list[int]  # indices into `seqs`, in the plan's order
    has_prefill: bool

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """The message for a plan."""
        indices = {seq.id: index for index, seq in enumerate(plan.seqs)}
        seqs = [SeqInput.of(seq, count) for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)]
        return cls(seqs, [indices[seq.id] for seq in plan.sampled], plan.has_prefill)

    def to_plan(self, dtype: torch.dtype) -> StepPlan:
        """A plan for which an engine of this dtype computes the same logits."""
        seqs = [own.to_sequence(dtype) for own in self.seqs]
        counts = [len(own.tokens) for own in self.seqs]
        return StepPlan(seqs, counts, [seqs[index] for index in self.sampled], self.has_prefill)


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
