# mypy: disallow-untyped-decorators=False
"""The best token of each row of logits in one Triton kernel, in one pass over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # tokens per loop iteration
_COLUMNS = tl.constexpr(5)  # of a table
_INVALID = tl.constexpr(2.0)  # state of a row whose best score is not finite


def best_token_table(values: Tensor) -> Tensor:
    """The table [b, 5], as engines/sampling/logprobs.py has it, of the tokens with the highest of `values` [b, V], of
    equal ones those with the lowest id. In single precision at most, on the current device.
    """
    rows, vocab_size = values.shape
    assert values.stride(1) == 1
    assert values.itemsize <= torch.float32.itemsize
    table = torch.empty(rows, _COLUMNS.value, dtype=torch.float64, device=values.device)
    _best_token[rows,](table, values, values.stride(0), vocab_size, block_size=_BLOCK, num_warps=8)
    return table


@triton.jit
def _best_token(
    table: tl.tensor, values: tl.tensor, stride: tl.tensor, vocab_size: tl.tensor, block_size: tl.constexpr
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
    is_invalid = (tl.max(is_nan, 0) > 0) | (tl.abs(maximum) == float("inf"))
    column = tl.arange(0, 8)
    numbers = tl.where(column == 0, token_id, tl.where((column == 1) & is_invalid, _INVALID, 0.0)).to(tl.float64)
    tl.store(table + row * _COLUMNS + column, numbers, mask=column < _COLUMNS)
