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

from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.lora.soft_prompts import flat_spans
from tgis.errors import StartError
from tgis.ipc.adapters import Prefix
from tgis.ipc.messages import Details, EngineOptions, Request, Sampling, Shutdown
from tgis.prompts.tensor_file import SoftPrompt


class Work(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one row computes in a step: `tokens`, after `computed` others whose keys and values are in `blocks`."""

    id: int
    tokens: list[int]
    computed: int
    blocks: list[int]
    explained: bool  # whether the logits of all its tokens are wanted
    virtual: list[bytes] = []  # of the tokens that are a soft prompt's: their embeddings, as they lie in memory

    def row(self, dtype: torch.dtype) -> Sequence:
        """A row of the same shape, its soft prompt of that type; what has been computed is not known again."""
        tokens = [0] * self.computed + self.tokens
        prefix = Prefix("", self.computed + len(self.virtual), 0, 0, 0) if self.virtual else None
        request = Request(self.id, tokens, 1, False, Sampling(), Details(inputs=self.explained), prefix=prefix)
        row = Sequence(request, queued_at=0.0, computed=self.computed, blocks=self.blocks)
        if self.virtual:
            embeddings = torch.frombuffer(bytearray(b"".join(self.virtual)), dtype=dtype).view(len(self.virtual), -1)
            row.prefix = SoftPrompt(0, pad(embeddings, (0, 0, self.computed, 0)))
        return row


class Pass(msgspec.Struct, frozen=True, tag="pass"):
    """A plan on its way to the other ranks: all that the logits depend on, and nothing of how they are used."""

    work: list[Work]
    sampled: list[int]  # places in `work`, in the order of the plan's sampled rows
    prefill: bool

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The pass that computes a plan."""
        places = {row.id: place for place, row in enumerate(plan.rows)}
        work = [_work(row, count) for row, count in zip(plan.rows, plan.counts, strict=True)]
        return cls(work, [places[row.id] for row in plan.sampled], plan.prefill)

    def plan(self, dtype: torch.dtype) -> Plan:
        """A plan that an engine of that type computes the same logits for."""
        rows = [work.row(dtype) for work in self.work]
        counts = [len(work.tokens) for work in self.work]
        return Plan(rows, counts, [rows[place] for place in self.sampled], self.prefill)


ToRank = EngineOptions | Pass | Shutdown


def check(config: PreTrainedConfig, shards: int) -> None:
    """StartError if the model cannot be cut into so many parts, or there are too few devices for them."""
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if not text.base_model_tp_plan:
        raise StartError(f"NUM_SHARD={shards}: transformers has no tensor-parallel plan for {text.model_type}")
    if heads % shards or shared % shards:
        raise StartError(f"NUM_SHARD={shards} must divide the model's {heads} attention and {shared} key-value heads")
    if torch.cuda.is_available() and torch.cuda.device_count() < shards:
        raise StartError(f"NUM_SHARD={shards} is more than the {torch.cuda.device_count()} GPUs")


def join(rank: int, shards: int, store: int) -> None:
    """Meet the other ranks by a file that all have open as file descriptor `store`; the group is torch's default.

    All are on this machine: nothing listens but on the loopback interface.
    """
    os.environ["LOCAL_RANK"] = str(rank)  # by which transformers picks the GPU
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    meeting = dist.FileStore(f"/proc/self/fd/{store}", shards)
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=meeting, rank=rank, world_size=shards, device_id=device)
    else:
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=shards)


def smallest(value: int) -> int:
    """The smallest of what the ranks say; they all ask at the same time."""
    values = torch.tensor([value], device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(values, dist.ReduceOp.MIN)
    return int(values.item())


def _work(row: Sequence, count: int) -> Work:
    tokens = row.tokens[row.computed : row.computed + count]
    explained = row.request.details.inputs and not row.generated
    spans = flat_spans([(row, count)])
    virtual = [token.numpy().tobytes() for span in spans for token in span.embeddings.cpu().view(torch.uint8)]
    return Work(row.id, tokens, row.computed, row.blocks, explained, virtual)
