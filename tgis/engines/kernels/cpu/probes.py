"""Whether a module or function of a model computes a formula: both are compared on random numbers, in float32."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

_TOLERANCE = 1e-5  # relative to the largest number of a row


def is_special(module: nn.Module) -> bool:
    """Whether a module has a kernel, or a forward that is not that of its class."""
    return hasattr(module, "runs_cpu_kernel") or "forward" in vars(module)


def inputs_of_all_sizes() -> Tensor:  # [64, 8], each row of one magnitude
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 2, 64)[:, None]


def output_of(function: Callable[..., Any], *inputs: Any, name: str = "") -> Any:
    """The output of a function; None if it does not accept such inputs. The log has `name`, or that of the function."""
    try:
        return function(*inputs)
    except Exception as error:  # noqa: BLE001 - the code is the model's
        log.debug("%s is not fused: %r", name or getattr(function, "__qualname__", function), error)
        return None


def rows_close(expected: Tensor, actual: Any) -> bool:
    """Whether each row is the same but for rounding."""
    if not isinstance(actual, Tensor) or expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    return bool(((expected - actual).abs().amax(-1) <= _TOLERANCE * expected.abs().amax(-1)).all())
