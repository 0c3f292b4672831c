"""Freeze rotary embeddings whose frequencies depend on the longest sequence of a pass.

Otherwise a sequence would change its neighbours and invalidate cached keys. All get the frequencies of the longest
sequence that is served.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

_LENGTH_DEPENDENT = {"dynamic", "longrope"}  # as transformers names them


def freeze_frequencies(model: PreTrainedModel, max_length: int) -> int:
    """Use the frequencies of `max_length` tokens for all sequences; how many embeddings were changed."""
    following = [module for module in model.modules() if _rope_types(module) & _LENGTH_DEPENDENT]
    for module in following:
        _freeze(module, torch.tensor([[max_length - 1]], device=model.device), model.dtype)
    return len(following)


def _rope_types(module: Any) -> set[str]:
    found = getattr(module, "rope_type", None)
    return set(found.values()) if isinstance(found, dict) else {found} if isinstance(found, str) else set()


def _freeze(module: Any, positions: torch.Tensor, dtype: torch.dtype) -> None:
    """Let transformers compute the frequencies for the last position, then make it keep them."""
    like = torch.empty(1, 1, 1, dtype=dtype, device=positions.device)
    if isinstance(module.rope_type, str):
        module(like, positions)
        module.rope_type = "default"
    else:
        for layer in module.rope_type:
            module(like, positions, layer)
        module.rope_type = dict.fromkeys(module.rope_type, "default")
