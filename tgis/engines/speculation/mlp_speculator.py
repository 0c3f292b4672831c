"""An MLP speculator: drafts tokens one after the other from the hidden state of a token and the token after it.

As published with fms-extras and vLLM: https://arxiv.org/abs/2404.19124. Only the best chain of tokens is drafted.
"""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu, linear
from transformers import PreTrainedModel

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.memory.available import available_memory
from tgis.engines.quantization.checkpoint import read_tensors
from tgis.engines.speculation.proposals import Drafter
from tgis.errors import StartError
from tgis.utils.logs import format_bytes

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class MLPConfig(msgspec.Struct, frozen=True):
    """The sizes in config.json."""

    vocab_size: _Size
    emb_dim: _Size  # width of the model's hidden states
    n_predict: Annotated[int, msgspec.Meta(ge=1, le=63)]
    inner_dim: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0  # 0: emb_dim
    tie_weights: bool = False  # all stages share their weights, except the first projection
    scale_input: bool = False

    @classmethod
    def of(cls, path: Path, config: dict[str, Any], model: PreTrainedModel) -> Self:
        """The sizes of a speculator for this model; StartError if the file has others."""
        try:
            sizes = msgspec.convert(config, cls)
        except msgspec.ValidationError as error:
            raise StartError(f"{path}/config.json: {error}") from None
        head = model.get_output_embeddings()
        vocab_sizes, hidden_sizes = (sizes.vocab_size, head.out_features), (sizes.emb_dim, head.in_features)
        for what, (size, needed) in {"a vocabulary": vocab_sizes, "hidden states": hidden_sizes}.items():
            if size != needed:
                raise StartError(f"{path} is for {what} of {size}, and the model has {needed}")
        return sizes

    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by name, shared ones once."""
        return {name: shape for stage in range(self.n_predict) for name, shape in self.shapes(stage)}

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all tensors."""
        return sum(map(math.prod, self.all_shapes().values())) * int(dtype.itemsize)

    def shapes(self, stage: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors of a stage."""
        inner = self.inner_dim or self.emb_dim
        shared, projection = (0, min(stage, 1)) if self.tie_weights else (stage, stage)
        yield f"emb.{shared}.weight", (self.vocab_size, inner)
        yield f"proj.{projection}.weight", (inner, inner if stage else self.emb_dim)
        yield f"ln.{shared}.weight", (inner,)
        yield f"ln.{shared}.bias", (inner,)
        yield f"head.{shared}.weight", (self.vocab_size, inner)


class MLPSpeculator(Drafter):
    """Drafts the best tokens from the hidden state of the last computed token of each sequence."""

    def __init__(self, path: Path, config: MLPConfig, model: PreTrainedModel, max_rows: int) -> None:
        """Draft for `model`, in steps of up to `max_rows` rows. StartError if tensors are missing, have other
        shapes, or do not fit into memory.
        """
        self.max_tokens, self._config = config.n_predict, config
        self._stages = _read(path, config, model.dtype)
        self._known: dict[int, tuple[int, Tensor]] = {}  # computed tokens and the last hidden state, by request id
        self._states = torch.zeros(max_rows, config.emb_dim, dtype=model.dtype)  # row i belongs to row i of the logits
        model.get_output_embeddings().register_forward_pre_hook(self._copy)

    def draft(self, plan: StepPlan) -> dict[int, list[int]]:
        """Drafts for the sequences whose last hidden state is known."""
        ends = {seq.id: len(seq.tokens) - 1 for seq in plan.seqs if seq.id in plan.drafts}
        asked = [seq for seq in plan.seqs if seq.id in self._known and self._known[seq.id][0] == ends.get(seq.id)]
        if not asked:
            return {}
        states = torch.stack([self._known[seq.id][1] for seq in asked])
        newest = torch.tensor([seq.tokens[-1] for seq in asked])
        drafts = self.chain(states, newest, max(plan.drafts[seq.id] for seq in asked)).tolist()
        limited = [(seq, tokens[: plan.drafts[seq.id]]) for seq, tokens in zip(asked, drafts, strict=True)]
        return {seq.id: tokens[: seq.num_allowed(tokens)] for seq, tokens in limited}

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the hidden states behind the newest tokens."""
        first = 0
        for seq, tokens in zip(plan.sampled, result.tokens, strict=True):
            proposed = len(plan.proposals.get(seq.id, ()))
            kept = min(max(len(tokens) - 1, 0), proposed)
            self._known[seq.id] = len(seq.tokens) + kept, self._states[first + kept].clone()
            first += 1 + proposed

    def release(self, seqs: Collection[Sequence]) -> None:
        for seq in seqs:
            self._known.pop(seq.id, None)

    def chain(self, states: Tensor, newest: Tensor, count: int) -> Tensor:
        """The best `count` tokens after each newest one, [rows, count]; `states` [rows, size] precede these."""
        config, drafted = self._config, []
        state_weight = 0.5 ** (0.5 / config.n_predict)
        token_weight = math.sqrt((1 - state_weight**2) * (config.inner_dim or config.emb_dim) / 2) / state_weight
        if config.scale_input:
            states = _normed(states) / math.sqrt(2)
        for emb, proj, scale, shift, head in self._stages[:count]:
            mixed = linear(states, proj).add_(embedding(newest, emb), alpha=token_weight)
            states = gelu(_normed(mixed) * scale + shift)
            newest = linear(states, head).argmax(-1)
            drafted.append(newest)
        return torch.stack(drafted, 1)

    def _copy(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Copy the inputs of the output layer; recorded passes replay the copy."""
        states = inputs[0].flatten(0, -2)[: len(self._states)]
        self._states[: len(states)].copy_(states)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _read(path: Path, config: MLPConfig, dtype: torch.dtype) -> list[list[Tensor]]:
    """The tensors of each stage."""
    shapes, needed, free = config.all_shapes(), config.num_bytes(dtype), available_memory(torch.device("cpu"))
    if needed > free:
        raise StartError(f"{path} is too big: it takes {format_bytes(needed)}, and {format_bytes(free)} are free")
    tensors = {name.removeprefix("speculator."): tensor for name, tensor in read_tensors(path)[0].items()}
    if missing := sorted(shapes.keys() - tensors):
        raise StartError(f"{path}: {len(missing)} tensors of an MLP speculator are missing, {missing[0]} for one")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise StartError(f"{path}: {name} has the shape {[*tensors[name].shape]}, not {[*shape]}")
    loaded = {name: tensors[name].to(dtype) for name in shapes}
    return [[loaded[name] for name, _ in config.shapes(stage)] for stage in range(config.n_predict)]
