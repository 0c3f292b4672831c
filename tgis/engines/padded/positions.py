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
class Places:
    """How a model's decoder gets to know them."""

    most: int  # tokens that the input, and the output, may have
    arguments: Callable[[Tensor], dict[str, Tensor]]  # places [rows, columns] -> for the forward of the next pass


class PlaceEmbeddings(nn.Module):  # type: ignore[misc]
    """Stands for the position embeddings of a decoder; `places` [rows, columns] hold for the next pass."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table  # [places, hidden]
        self.places = torch.empty((0, 0), dtype=torch.int64)

    def arguments(self, places: Tensor) -> dict[str, Tensor]:
        """None are needed."""
        self.places = places
        return {}

    def forward(self, *_: Any, **__: Any) -> Tensor:  # each architecture passes something else
        """The embeddings, [rows, columns, hidden]."""
        return self.table[self.places]


def check_rows(network: PreTrainedModel) -> None:
    """Unsupported if rows would disturb each other: experts that have only so much room, decoders that see padding.

    LED and FSMT, say, look at everything before a single token, whatever the mask.
    """
    if getattr(network.config, "num_experts", 0):
        raise _unsupported(network, "shares experts among rows")
    ids = torch.arange(4, 7, device=network.device).expand(2, -1)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]], device=network.device)
    past = network(input_ids=ids, decoder_input_ids=ids[:, :2], use_cache=True).past_key_values
    output = network(
        input_ids=ids, decoder_input_ids=ids[:, 2:], decoder_attention_mask=mask, past_key_values=past, use_cache=True
    )
    if torch.allclose(output.logits[0], output.logits[1], rtol=1e-3):
        raise _unsupported(network, "sees padding")


def find_places(network: PreTrainedModel, most: int) -> Places:
    """How it is with this model, whose sequences have `most` tokens; Unsupported where nobody knows."""
    decoder = network.get_decoder()
    if "decoder_position_ids" in inspect.signature(network.forward).parameters:
        return Places(most, lambda places: {"decoder_position_ids": places})
    if hasattr(decoder, "embed_positions") and hasattr(network.config, "max_position_embeddings"):
        most = min(most, network.config.max_position_embeddings)
        decoder.embed_positions = PlaceEmbeddings(_embeddings(network, most))
        return Places(most, decoder.embed_positions.arguments)
    if any(name.endswith("relative_attention_bias") for name, _ in decoder.named_modules()):
        return Places(most, lambda _: {})  # counted from the newest token, in whose column all rows end
    raise _unsupported(network, "places tokens in an unknown way")


def _unsupported(network: PreTrainedModel, reason: str) -> Unsupported:
    return Unsupported(f"models of type {network.config.model_type} are not supported: their decoder {reason}")


class _Seen(Exception):
    """Ends a pass that has done what it was for."""


def _embeddings(network: PreTrainedModel, count: int) -> Tensor:
    """What the decoder embeds for its first places, [count, hidden], as a pass over so many tokens shows."""

    def see(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        raise _Seen(output)

    hook = network.get_decoder().embed_positions.register_forward_hook(see)
    token = 1 if network.config.pad_token_id == 0 else 0  # some give padding no place
    ids = torch.full((1, count), token, device=network.device)
    try:
        network.base_model(input_ids=ids[:, :1], decoder_input_ids=ids, use_cache=False)
    except _Seen as seen:
        output: Tensor = seen.args[0]
    finally:
        hook.remove()
    return output.reshape(count, -1)
