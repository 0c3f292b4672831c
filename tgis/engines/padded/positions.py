"""The places of tokens in a decoder: each row has its own, where transformers' decoders count one for the batch.

And what else a decoder must know for rows to stand side by side; a model that does not is refused at the start.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgis.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Positions:
    """How a model's decoder gets to know them."""

    max_positions: int  # tokens that the input, and the output, may have
    forward_arguments: Callable[
        [Tensor], dict[str, Tensor]
    ]  # places [rows, columns] -> for the forward of the next pass


class PositionEmbeddings(nn.Module):  # type: ignore[misc]
    """Stands for the position embeddings of a decoder; `places` [rows, columns] hold for the next pass."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table  # [places, hidden]
        self.positions = torch.empty((0, 0), dtype=torch.int64)

    def forward_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        """None are needed."""
        self.positions = positions
        return {}

    def forward(self, *_: Any, **__: Any) -> Tensor:  # each architecture passes something else
        """The embeddings, [rows, columns, hidden]."""
        return self.table[self.positions]


def check_row_independence(model: PreTrainedModel) -> None:
    """Unsupported if rows would disturb each other: experts that have only so much room, decoders that see padding.

    LED and FSMT, say, look at everything before a single token, whatever the mask.
    """
    if getattr(model.config, "num_experts", 0):
        raise _unsupported(model, "shares experts among rows")
    ids = torch.arange(4, 7, device=model.device).expand(2, -1)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]], device=model.device)
    past = model(input_ids=ids, decoder_input_ids=ids[:, :2], use_cache=True).past_key_values
    output = model(
        input_ids=ids, decoder_input_ids=ids[:, 2:], decoder_attention_mask=mask, past_key_values=past, use_cache=True
    )
    if torch.allclose(output.logits[0], output.logits[1], rtol=1e-3):
        raise _unsupported(model, "sees padding")


def find_positions(model: PreTrainedModel, max_positions: int) -> Positions:
    """How it is with this model, whose sequences have `most` tokens; Unsupported where nobody knows."""
    decoder = model.get_decoder()
    if "decoder_position_ids" in inspect.signature(model.forward).parameters:
        return Positions(max_positions, lambda places: {"decoder_position_ids": places})
    if hasattr(decoder, "embed_positions") and hasattr(model.config, "max_position_embeddings"):
        max_positions = min(max_positions, model.config.max_position_embeddings)
        decoder.embed_positions = PositionEmbeddings(_position_embeddings(model, max_positions))
        return Positions(max_positions, decoder.embed_positions.forward_arguments)
    if any(name.endswith("relative_attention_bias") for name, _ in decoder.named_modules()):
        return Positions(max_positions, lambda _: {})  # counted from the newest token, in whose column all rows end
    raise _unsupported(model, "places tokens in an unknown way")


def _unsupported(model: PreTrainedModel, reason: str) -> Unsupported:
    return Unsupported(f"models of type {model.config.model_type} are not supported: their decoder {reason}")


class _StopForward(Exception):
    """Ends a pass that has done what it was for."""


def _position_embeddings(model: PreTrainedModel, count: int) -> Tensor:
    """What the decoder embeds for its first places, [count, hidden], as a pass over so many tokens shows."""

    def see(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        raise _StopForward(output)

    hook = model.get_decoder().embed_positions.register_forward_hook(see)
    token = 1 if model.config.pad_token_id == 0 else 0  # some give padding no place
    ids = torch.full((1, count), token, device=model.device)
    try:
        model.base_model(input_ids=ids[:, :1], decoder_input_ids=ids, use_cache=False)
    except _StopForward as seen:
        output: Tensor = seen.args[0]
    finally:
        hook.remove()
    return output.reshape(count, -1)
