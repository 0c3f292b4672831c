"""Zeros behind the last dimension, for kernels that take multiples of some size."""

from torch import Tensor, cat


def zero_padded(x: Tensor, multiple: int) -> Tensor:
    """x [..., size] up to the next multiple; by operators that can be recorded for any number of tokens."""
    missing = -x.shape[-1] % multiple
    return cat([x, x.new_zeros(1).expand(*x.shape[:-1], missing)], -1) if missing else x
