"""One model over several processes, the ranks: which models, how the ranks find each other, what they are told.

How a model is cut, and the sums between its parts, are transformers' and torch's business.
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
from tgis.ipc.adapters import AdapterRef
from tgis.ipc.messages import EngineOptions, Shutdown
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.prompts.tensor_file import SoftPrompt


class SeqInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one row computes in a step: `tokens`, after `computed` others whose keys and values are in `blocks`."""

    id: int
    tokens: list[int]
    num_computed_tokens: int
    block_table: list[int]
    prompt_logprobs: bool  # whether the logits of all its tokens are wanted
    soft_prompt: list[bytes] = []  # of the tokens that are a soft prompt's: their embeddings, as they lie in memory

    def to_sequence(self, dtype: torch.dtype) -> Sequence:
        """A row of the same shape, its soft prompt of that type; what has been computed is not known again."""
        tokens = [0] * self.num_computed_tokens + self.tokens
        prefix = AdapterRef("", self.num_computed_tokens + len(self.soft_prompt), 0, 0, 0) if self.soft_prompt else None
        request = Request(
            self.id,
            tokens,
            1,
            False,
            SamplingParams(),
            LogprobOptions(input_tokens=self.prompt_logprobs),
            adapter=prefix,
        )
        row = Sequence(
            request, arrival_time=0.0, num_computed_tokens=self.num_computed_tokens, block_table=self.block_table
        )
        if self.soft_prompt:
            embeddings = torch.frombuffer(bytearray(b"".join(self.soft_prompt)), dtype=dtype).view(
                len(self.soft_prompt), -1
            )
            row.adapter = SoftPrompt(0, pad(embeddings, (0, 0, self.num_computed_tokens, 0)))
        return row


class StepInput(msgspec.Struct, frozen=True, tag="pass"):
    """A plan on its way to the other ranks: all that the logits depend on, and nothing of how they are used."""

    sequences: list[SeqInput]
    sampled: list[int]  # places in `work`, in the order of the plan's sampled rows
    prefill: bool

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        """The pass that computes a plan."""
        places = {row.id: place for place, row in enumerate(plan.seqs)}
        work = [_seq_input(row, count) for row, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)]
        return cls(work, [places[row.id] for row in plan.sampled], plan.has_prefill)

    def to_plan(self, dtype: torch.dtype) -> StepPlan:
        """A plan that an engine of that type computes the same logits for."""
        rows = [work.to_sequence(dtype) for work in self.sequences]
        counts = [len(work.tokens) for work in self.sequences]
        return StepPlan(rows, counts, [rows[place] for place in self.sampled], self.prefill)


RankMessage = EngineOptions | StepInput | Shutdown


def check_shardable(config: PreTrainedConfig, num_shards: int) -> None:
    """StartError if the model cannot be cut into so many parts, or there are too few devices for them."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if not text.base_model_tp_plan:
        raise StartError(f"NUM_SHARD={num_shards}: transformers has no tensor-parallel plan for {text.model_type}")
    if heads % num_shards or shared % num_shards:
        raise StartError(
            f"NUM_SHARD={num_shards} must divide the model's {heads} attention and {shared} key-value heads"
        )
    if torch.cuda.is_available() and torch.cuda.device_count() < num_shards:
        raise StartError(f"NUM_SHARD={num_shards} is more than the {torch.cuda.device_count()} GPUs")


def init_ranks(rank: int, num_shards: int, store_fd: int) -> None:
    """Meet the other ranks by a file that all have open as file descriptor `store`; the group is torch's default.

    All are on this machine: nothing listens but on the loopback interface.
    """
    os.environ["LOCAL_RANK"] = str(rank)  # by which transformers picks the GPU
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    meeting = dist.FileStore(f"/proc/self/fd/{store_fd}", num_shards)
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=meeting, rank=rank, world_size=num_shards, device_id=device)
    else:
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_shards)


def all_reduce_min(value: int) -> int:
    """The smallest of what the ranks say; they all ask at the same time."""
    values = torch.tensor([value], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(values, dist.ReduceOp.MIN)
    return int(values.item())


def _seq_input(row: Sequence, count: int) -> SeqInput:
    tokens = row.tokens[row.num_computed_tokens : row.num_computed_tokens + count]
    explained = row.request.logprob_options.input_tokens and not row.num_generated_tokens
    spans = flat_spans([(row, count)])
    virtual = [token.numpy().tobytes() for span in spans for token in span.embeddings.cpu().view(torch.uint8)]
    return SeqInput(row.id, tokens, row.num_computed_tokens, row.block_table, explained, virtual)
