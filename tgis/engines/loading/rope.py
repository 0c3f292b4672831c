"""Rotary embeddings whose frequencies follow the longest row of a pass: fixed, or rows would change their neighbours.

Cached keys would no longer fit, either. What holds for the longest sequences that are served holds for all.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

_LENGTH_DEPENDENT = {"dynamic", "longrope"}  # as transformers names what it computes anew


def freeze_frequencies(model: PreTrainedModel, max_length: int) -> int:
    """Give all rows those of a row of `longest` tokens, for good; how many embeddings were changed."""
    following = [module for module in model.modules() if _rope_types(module) & _LENGTH_DEPENDENT]
    for module in following:
        _freeze(module, torch.tensor([[max_length - 1]], device=model.device), model.dtype)
    return len(following)


def _rope_types(module: Any) -> set[str]:
    found = getattr(module, "rope_type", None)
    return set(found.values()) if isinstance(found, dict) else {found} if isinstance(found, str) else set()


def _freeze(module: Any, places: torch.Tensor, dtype: torch.dtype) -> None:
    """One pass at the last place, in which transformers does what it does; and no other."""
    like = torch.empty(1, 1, 1, dtype=dtype, device=places.device)
    if isinstance(module.rope_type, str):
        module(like, places)
        module.rope_type = "default"
    else:
        for layer in module.rope_type:
            module(like, places, layer)
        module.rope_type = dict.fromkeys(module.rope_type, "default")
