"""Which Triton kernels are used: none on an unsuitable device, and none that fails its self-test there, because it does
not compile or does not give what PyTorch gives.
"""

import logging
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from tgis.engines.kernels.agreement import agrees, relative_error

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton serves this device."""
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def is_fatal(error: Exception) -> bool:
    """Whether the device is out of memory or lost, so that computing the same in another way would fail too."""
    is_of_capture = "captur" in str(error)  # all messages of cudaErrorStreamCapture... have it
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError) and not is_of_capture
    )


def fallback_reason(error: Exception) -> str:
    """Why something is computed in another way after this error, in a line; a fatal error is raised again."""
    if is_fatal(error):
        raise error
    return str(error).strip().splitlines()[0]


class KernelSelfTest:
    """Compares each kernel with PyTorch at its first use, for each kind of arguments that it is compiled for."""

    def __init__(self, max_other_integers: float = 0.0) -> None:
        """`max_other_integers` is the share of integers that may differ, such as tokens that near ties decide."""
        self._max_other_integers = max_other_integers
        self._passed: dict[tuple[Callable[..., Any], Hashable], bool] = {}

    def run(
        self,
        kind: Hashable,
        kernel: Callable[..., _Result],
        plain: Callable[..., _Result],
        outputs: Callable[[_Result], Tensor],
        *arguments: Any,
    ) -> _Result:
        """Call the kernel, or PyTorch if the self-test fails, which compares `outputs` of both results. Fatal errors of
        the device are raised.
        """
        if kernel is plain:
            return plain(*arguments)
        key = kernel, kind
        if key not in self._passed:
            try:
                problem = _difference(outputs(kernel(*arguments)), outputs(plain(*arguments)), self._max_other_integers)
            except Exception as error:  # compilers raise anything
                if is_fatal(error):
                    raise
                problem = " ".join(repr(error).split())[:300]
            self._passed[key] = problem is None
            if problem is not None:
                name, count = kernel.__name__.strip("_"), list(self._passed.values()).count(False)
                log.warning("PyTorch computes in place of %s (%d kernels failed so far): %s", name, count, problem)
        return kernel(*arguments) if self._passed[key] else plain(*arguments)


def _difference(computed: Tensor, expected: Tensor, max_other_integers: float) -> str | None:
    """A description of the difference, if it is more than rounding explains."""
    if computed.shape != expected.shape or computed.dtype != expected.dtype:
        return f"{computed.dtype} {tuple(computed.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if not computed.is_floating_point():
        share = (computed != expected).double().mean().item()
        return None if share <= max_other_integers else f"{share:.0%} of the numbers differ"
    if agrees(computed, expected, expected.dtype):
        return None
    return f"off by {relative_error(computed, expected):.1e}"
