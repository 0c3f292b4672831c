"""Positions of tokens in the decoder of an encoder-decoder. Transformers counts one position for the whole batch; here
each row has its own.

A model whose rows would disturb each other, or whose positions cannot be set, is refused at the start.
"""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgis.engines.loading.positions import position_embeddings
from tgis.errors import Unsupported

ForwardArguments = Callable[[Tensor], dict[str, Tensor]]  # from the positions [rows, columns] of the next pass


def check_row_independence(model: PreTrainedModel) -> None:
    """Raise Unsupported if rows would disturb each other: experts of limited capacity, decoders that see padding.

    LED and FSMT, for example, ignore the mask when they decode a single token.
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


def find_positions(model: PreTrainedModel, max_positions: int) -> tuple[int, ForwardArguments]:
    """The tokens that the input, and the output, of a sequence may have, at most `max_positions`, and how the decoder
    is told their positions; Unsupported if its way is unknown.
    """
    decoder = model.get_decoder()
    if "decoder_position_ids" in inspect.signature(model.forward).parameters:
        return max_positions, lambda positions: {"decoder_position_ids": positions}
    if hasattr(decoder, "embed_positions") and hasattr(model.config, "max_position_embeddings"):
        max_positions = min(max_positions, model.config.max_position_embeddings)
        decoder.embed_positions = position_embeddings(model, decoder, max_positions)
        return max_positions, decoder.embed_positions.forward_arguments
    if any(name.endswith("relative_attention_bias") for name, _ in decoder.named_modules()):
        return max_positions, lambda _: {}  # relative to the newest token, whose column all rows share
    raise _unsupported(model, "places tokens in an unknown way")


def _unsupported(model: PreTrainedModel, reason: str) -> Unsupported:
    return Unsupported(f"models of type {model.config.model_type} are not supported: their decoder {reason}")
