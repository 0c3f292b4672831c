"""Whether an optimized implementation agrees with its reference up to rounding: the tolerances of all self-tests."""

import math

import torch
from torch import Tensor, nn

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 0.02
_HALF_LOGITS_TOLERANCE = 0.3  # the rounding of all layers adds up


def relative_error(computed: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to that of the expected values; infinite if other values are not finite."""
    computed, expected = computed.double(), expected.double()
    if not torch.allclose(*(x.where(~x.isfinite(), 0.0) for x in (computed, expected)), equal_nan=True):
        return math.inf
    computed, expected = (x.where(x.isfinite(), 0.0) for x in (computed, expected))
    return float((computed - expected).norm() / expected.norm().clamp(min=1e-30))


def agrees(computed: Tensor, expected: Tensor, dtype: torch.dtype, *, logits: bool = False) -> bool:
    """Whether the relative error is at most that of rounding to this dtype, of all layers for `logits`."""
    half_tolerance = _HALF_LOGITS_TOLERANCE if logits else _HALF_TOLERANCE
    return relative_error(computed, expected) <= _TOLERANCE.get(dtype, half_tolerance)


def dtype_of_logits(model: nn.Module) -> torch.dtype:
    """The dtype whose rounding logits have. Activations in 8 bits differ by a step where a value is halfway between two
    codes, which is as coarse as half precision.
    """
    rounds = any(getattr(module, "rounds_inputs", False) for module in model.modules())
    return torch.bfloat16 if rounds else model.dtype
