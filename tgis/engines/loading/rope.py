"""Rotary embeddings of transformers' models.

Where frequencies depend on the longest sequence of a pass, a sequence would change its neighbours and invalidate cached
keys. All sequences therefore get the frequencies of the longest sequence that is served. On CPUs, cosines and sines of
all positions are computed at load.
"""

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding
from transformers import PreTrainedModel

_LENGTH_DEPENDENT = {"dynamic", "longrope"}  # names in transformers


def freeze_frequencies(model: PreTrainedModel, max_length: int) -> int:
    """Use the frequencies of `max_length` tokens for all sequences; returns the number of embeddings changed."""
    following = [module for module in model.modules() if not _LENGTH_DEPENDENT.isdisjoint(_rope_types(module).values())]
    for module in following:
        _freeze(module, torch.tensor([[max_length - 1]], device=model.device), model.dtype)
    return len(following)


def _rope_types(module: Any) -> dict[str | None, str | None]:
    """The types of frequencies by type of layer; by None if all layers have the same."""
    kind = getattr(module, "rope_type", None)
    return kind if isinstance(kind, dict) else {None: kind}


def _freeze(module: Any, positions: torch.Tensor, dtype: torch.dtype) -> None:
    """Let transformers compute the frequencies for the last position, then make it keep them."""
    like = torch.empty(1, 1, 1, dtype=dtype, device=positions.device)
    layers = _rope_types(module)
    for layer in layers:
        module(like, positions, *([] if layer is None else [layer]))
    module.rope_type = "default" if None in layers else dict.fromkeys(layers, "default")


def tabulate_angles(model: PreTrainedModel, max_length: int) -> None:
    """Look up cosines and sines of positions below `max_length` in tables."""
    for module in model.modules():
        if tables := _tables(module, max_length, model.dtype):
            module.forward = partial(_look_up, *tables, module.forward)


def _tables(module: Any, max_length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """The tables of a rotary embedding; None unless it is a function of positions alone."""
    if not isinstance(getattr(module, "rope_type", None), str):
        return None
    if list(signature(module.forward).parameters) != ["x", "position_ids"]:
        return None
    try:
        angles = module(torch.empty(1, 1, 1, dtype=dtype), torch.arange(max_length)[None])
    except (RuntimeError, IndexError):  # positions of several dimensions
        return None
    if not isinstance(angles, tuple) or len(angles) != 2:  # one complex tensor
        return None
    cos, sin = angles
    return (cos[0], sin[0]) if cos.dtype == dtype and cos.shape[:2] == (1, max_length) else None


def _look_up(cos: Tensor, sin: Tensor, compute: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    if x.dtype != cos.dtype:
        return compute(x, position_ids)
    if position_ids.ndim > 2:  # the positions of text are the same in time, height and width
        position_ids = position_ids[0]
    return embedding(position_ids, cos), embedding(position_ids, sin)
