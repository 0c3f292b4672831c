"""Steps as the other ranks get them: the changes since the last step, however long the sequences are.

Rank 0 has the sequences of the batcher. The others mirror them (tokens, blocks, adapters: all that logits depend on),
because for 32 decodes at 100,000 tokens the block tables alone of a step's inputs are 1.6 MB, its changes 2 KB.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.prompts.lora import LoraAdapter, LoraLayerWeights
from tgis.prompts.soft_prompt import SoftPrompt

_DECODER, _ENCODER, _LORA_A, _LORA_B = "decoder", "encoder", ".lora_A", ".lora_B"


class SeqUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The changes of a sequence since its last step; in its first step all of it."""

    id: int
    num_scheduled_tokens: int
    num_computed_tokens: int
    tokens: list[int]  # new ones
    first_block: int
    blocks: list[int]  # part of the block table, beginning at first_block
    proposed: list[int]  # tokens to verify
    request: Request | None = None
    adapter: bytes = b""  # safetensors; empty if another sequence has this adapter


class StepInput(msgspec.Struct, frozen=True, tag="step"):
    """A plan as the other ranks receive it."""

    seqs: list[SeqUpdate]
    released: list[int]


class SentSequences:
    """The state of sequences that the other ranks have."""

    def __init__(self) -> None:
        # By id: the sequence, its number of tokens, its block table, and the number of blocks in it.
        self._sent: dict[int, tuple[Sequence, int, list[int], int]] = {}
        self._released: list[int] = []

    def step_input(self, plan: StepPlan) -> StepInput:
        """The message for a plan."""
        updates = [
            self._update(seq, count, plan.proposals.get(seq.id, []))
            for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        ]
        released, self._released = self._released, []
        return StepInput(updates, released)

    def release(self, seqs: Collection[Sequence]) -> None:
        """Forget sequences, here and with the next message."""
        self._released += [seq.id for seq in seqs if self._sent.pop(seq.id, None)]

    def _update(self, seq: Sequence, count: int, proposed: list[int]) -> SeqUpdate:
        known = self._sent.get(seq.id)
        _, tokens, table, blocks = known or (seq, seq.prompt_length, seq.block_table, 0)
        first = blocks if table is seq.block_table else 0  # a table only grows, or is another list
        added = seq.tokens[tokens:], first, seq.block_table[first:]
        first_step = (_request_of(seq), self._adapter_of(seq)) if known is None else ()
        self._sent[seq.id] = seq, len(seq.tokens), seq.block_table, len(seq.block_table)
        return SeqUpdate(seq.id, count, seq.num_computed_tokens, *added, proposed, *first_step)

    def _adapter_of(self, seq: Sequence) -> bytes:
        """The tensors of its adapter, unless the other ranks have them."""
        if seq.adapter is None or any(other.adapter is seq.adapter for other, *_ in self._sent.values()):
            return b""
        return save({name: x.cpu().contiguous() for name, x in _tensors(seq.adapter).items()})


def _request_of(seq: Sequence) -> Request:
    """The part of a request that the other ranks need. The sampling parameters stay here: only rank 0 chooses tokens.
    The grammar's number goes along, because the steps that are launched ahead depend on it.
    """
    details = LogprobOptions(input_tokens=seq.request.logprob_options.input_tokens)
    return msgspec.structs.replace(seq.request, sampling_params=SamplingParams(), logprob_options=details)


class MirroredSequences:
    """The sequences of the first rank, on another rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seqs: dict[int, Sequence] = {}

    def pop(self, ids: Collection[int] | None = None) -> list[Sequence]:
        """Remove and return these sequences, or all; unknown ids are skipped."""
        return [self._seqs.pop(id_) for id_ in (list(self._seqs) if ids is None else ids) if id_ in self._seqs]

    def plan(self, step: StepInput) -> StepPlan:
        """The plan of a message, after updating its sequences."""
        counts = [update.num_scheduled_tokens for update in step.seqs]
        plan = StepPlan.of([self._updated(update) for update in step.seqs], counts)
        proposals = {update.id: update.proposed for update in step.seqs if update.proposed}
        return replace(plan, proposals=proposals)

    def _updated(self, update: SeqUpdate) -> Sequence:
        if update.request is not None:
            reference = update.request.adapter
            adapter = self._adapter(reference, update.adapter) if reference else None
            self._seqs[update.id] = Sequence(update.request, 0.0, adapter=adapter)
        seq = self._seqs[update.id]
        seq.tokens += update.tokens
        seq.num_computed_tokens = update.num_computed_tokens
        if update.first_block < len(seq.block_table):
            seq.block_table = seq.block_table[: update.first_block]  # a new list: engines expect a list only to grow
        seq.block_table += update.blocks
        return seq

    def _adapter(self, reference: AdapterRef, content: bytes) -> Any:
        if not content:
            adapters = (seq.adapter for seq in self._seqs.values() if seq.adapter)
            return next(adapter for adapter in adapters if adapter.version == reference.version)
        tensors = {name: x.to(self._device) for name, x in load(content).items()}
        if reference.length:
            parts = tensors.get(_DECODER), tensors.get(_ENCODER)
            return SoftPrompt(reference.version, *parts, encoder_decoder=reference.decoder_length > 0)
        names = [name.removesuffix(_LORA_A) for name in tensors if name.endswith(_LORA_A)]
        layers = {name: LoraLayerWeights(tensors[name + _LORA_A], tensors[name + _LORA_B]) for name in names}
        return LoraAdapter(reference.version, layers)


def _tensors(adapter: SoftPrompt | LoraAdapter) -> dict[str, Tensor]:
    if isinstance(adapter, SoftPrompt):
        parts = {_DECODER: adapter.decoder, _ENCODER: adapter.encoder}
        return {name: part for name, part in parts.items() if part is not None}
    downs = {name + _LORA_A: layer.lora_a for name, layer in adapter.layers.items()}
    return downs | {name + _LORA_B: layer.lora_b for name, layer in adapter.layers.items()}
