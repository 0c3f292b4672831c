"""Positions of encoder-decoders, whose code in transformers gives all rows of a batch the same positions."""

import inspect
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from tgis.errors import Unsupported

_PREFIXES = {"encoder": "", "decoder": "decoder_"}  # prefixes of argument names
_NO_MASKS = {"full_attention": None, "sliding_attention": None}  # masks by layer type


class EncoderDecoderPositions:
    """How a model is told the positions of its tokens: by an argument, by embeddings that replace its own, or not at
    all where they are relative to the newest token.
    """

    def __init__(self, model: PreTrainedModel, length: int, *parts: str) -> None:
        """Sequences have up to `length` positions. Unsupported if it is unknown how the decoder places tokens."""
        self.length = length
        self._embeddings: dict[str, PositionEmbeddings] = {}
        self._takes_positions = "decoder_position_ids" in inspect.signature(model.forward).parameters
        names = (name for name, _ in model.get_decoder().named_modules())
        if self._takes_positions or any(name.endswith("relative_attention_bias") for name in names):
            return
        if not hasattr(model.get_decoder(), "embed_positions") or not hasattr(model.config, "max_position_embeddings"):
            name = model.config.model_type
            raise Unsupported(f"models of type {name} are not supported: their decoder places tokens in an unknown way")
        self.length = min(length, model.config.max_position_embeddings)
        self._embeddings = {part: position_embeddings(model, part, self.length) for part in parts}

    def install(self, model: PreTrainedModel) -> None:
        """Replace the embeddings of the parts, if it has any, for good."""
        for part, embeddings in self._embeddings.items():
            _part(model, part).embed_positions = embeddings

    def arguments(self, part: str, positions: Tensor) -> dict[str, Any]:
        """The arguments of a pass, without masks, whose tokens have the `positions` [rows, columns] in this part."""
        if part in self._embeddings:
            self._embeddings[part].positions = positions
        arguments = {"position_ids": positions, "attention_mask": _NO_MASKS} if self._takes_positions else {}
        return {_PREFIXES[part] + name: value for name, value in arguments.items()}

    def input_positions(self, tokens: list[int]) -> Iterable[int]:
        """The positions of the tokens of an input; padding may have none."""
        return self._embeddings["encoder"].positions_of(tokens) if self._embeddings else range(len(tokens))


class PositionEmbeddings(nn.Module):  # type: ignore[misc]
    """Replaces the position embeddings of an encoder or a decoder; `positions` [rows, columns] are those of the next
    pass.
    """

    def __init__(self, table: Tensor, padding: int | None = None) -> None:
        """With a `padding` token, which has no position, the last row is for it."""
        super().__init__()
        self.table = table  # [positions, H]
        self._padding = padding
        self.positions = torch.empty((0, 0), dtype=torch.int64)

    def positions_of(self, tokens: list[int]) -> list[int]:
        """The positions of the tokens of an input."""
        if self._padding not in tokens:
            return list(range(len(tokens)))
        counts = accumulate(token != self._padding for token in tokens)
        last = len(self.table) - 1
        return [last if token == self._padding else count - 1 for token, count in zip(tokens, counts, strict=True)]

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The embeddings [rows, columns, H]; the arguments differ between architectures and are ignored."""
        return embedding(self.positions, self.table)


class _StopForward(Exception):
    """Ends a pass early, with the observed output."""


def position_embeddings(model: PreTrainedModel, part: str, count: int) -> PositionEmbeddings:
    """A replacement of the `embed_positions` of a part of the model, for up to `count` positions."""
    padding = model.config.pad_token_id
    token = 1 if padding == 0 else 0
    table = _observed_embeddings(model, part, [token] * count)
    beside_padding = _observed_embeddings(model, part, [token, token if padding is None else padding, token])
    if torch.equal(beside_padding[:count], table[:3]):
        return PositionEmbeddings(table)
    return PositionEmbeddings(torch.cat([table, beside_padding[1:2]]), padding)


def _part(model: PreTrainedModel, name: str) -> nn.Module:
    return model.get_encoder() if name == "encoder" else model.get_decoder()


def _observed_embeddings(model: PreTrainedModel, part: str, tokens: list[int]) -> Tensor:
    """The embeddings [tokens, H] of positions in a pass over these tokens."""

    def stop(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        raise _StopForward(output)

    hook = _part(model, part).embed_positions.register_forward_hook(stop)
    ids = torch.tensor([tokens], device=model.device)
    input_ids = ids if part == "encoder" else ids[:, :1]
    try:
        model.base_model(input_ids=input_ids, decoder_input_ids=ids, use_cache=False)
    except _StopForward as stopped:
        output: Tensor = stopped.args[0]
    finally:
        hook.remove()
    return output.reshape(len(tokens), -1)
