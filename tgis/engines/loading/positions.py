"""Position embeddings of encoder-decoders, whose own code gives all rows of a batch the same positions."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel


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

    def forward_arguments(self, positions: Tensor) -> dict[str, Tensor]:
        """Set the positions of the next pass; returns no arguments."""
        self.positions = positions
        return {}

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """The embeddings [rows, columns, H]; the arguments differ between architectures and are ignored."""
        return embedding(self.positions, self.table)


class _StopForward(Exception):
    """Ends a pass early, with the output that is wanted."""


def position_embeddings(model: PreTrainedModel, part: nn.Module, count: int) -> PositionEmbeddings:
    """What can replace the `embed_positions` of the model's encoder, or its decoder, for up to `count` positions."""
    padding = model.config.pad_token_id
    token = 1 if padding == 0 else 0
    table = _own_embeddings(model, part, [token] * count)
    beside_padding = _own_embeddings(model, part, [token, token if padding is None else padding, token])
    if torch.equal(beside_padding[:count], table[:3]):
        return PositionEmbeddings(table)
    return PositionEmbeddings(torch.cat([table, beside_padding[1:2]]), padding)


def _own_embeddings(model: PreTrainedModel, part: nn.Module, tokens: list[int]) -> Tensor:
    """The embeddings [tokens, H] of positions in a pass over these tokens."""

    def stop(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        raise _StopForward(output)

    hook = part.embed_positions.register_forward_hook(stop)
    ids = torch.tensor([tokens], device=model.device)
    input_ids = ids if part is model.get_encoder() else ids[:, :1]
    try:
        model.base_model(input_ids=input_ids, decoder_input_ids=ids, use_cache=False)
    except _StopForward as stopped:
        output: Tensor = stopped.args[0]
    finally:
        hook.remove()
    return output.reshape(len(tokens), -1)
