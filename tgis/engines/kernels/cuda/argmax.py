# mypy: disallow-untyped-decorators=False
"""The best token of each row of logits in one Triton kernel, in one pass over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # tokens per loop iteration


def argmax_lowest_id(values: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of `values` [b, V] and its id, the lowest of equal ones, each [b, 1]; NaN if any is NaN. In at most
    single precision, on the current device.
    """
    (rows, vocab_size), device = values.shape, values.device
    assert values.stride(1) == 1
    assert values.itemsize <= torch.float32.itemsize
    best = torch.empty(rows, 1, dtype=values.dtype, device=device)
    token_ids = torch.empty(rows, 1, dtype=torch.int64, device=device)
    _argmax_row[rows,](best, token_ids, values, values.stride(0), vocab_size, block_size=_BLOCK, num_warps=8)
    return best, token_ids


@triton.jit
def _argmax_row(
    best: tl.tensor,
    token_ids: tl.tensor,
    values: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    block_size: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full([block_size], float("-inf"), tl.float32)
    first = tl.zeros([block_size], tl.int32)  # a valid id, even of a row without any number
    is_nan = tl.zeros([block_size], tl.int32)
    for start in range(0, vocab_size, block_size):
        ids = start + tl.arange(0, block_size)
        value = tl.load(values + row * stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_nan |= (value != value).to(tl.int32)
        first = tl.where(value > highest, ids, first)
        highest = tl.maximum(highest, value)
    maximum = tl.max(highest, 0)
    token_id = tl.min(tl.where(highest == maximum, first, vocab_size - 1), 0)
    tl.store(token_ids + row, token_id.to(tl.int64))
    maximum = tl.where(tl.max(is_nan, 0) > 0, float("nan"), maximum)
    tl.store(best + row, maximum.to(best.dtype.element_ty))
