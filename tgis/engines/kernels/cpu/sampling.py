"""Choosing a token from scores over a whole vocabulary, in one pass over them: by argmax.c and gumbel_max.c."""

import ctypes

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels

_COLUMNS = 5  # columns of a table; same value in argmax.c
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class CpuArgmax:
    """The token with the highest score, the one with the lowest id if several are equal."""

    def __init__(self, kernels: CpuKernels) -> None:
        argtypes = [_POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _INTEGER]
        self.functions = kernels.functions("argmax", argtypes)

    def __call__(self, scores: Tensor, *, details: bool) -> Tensor:
        """The table [b, 5] of the best tokens of scores [b, V], in the layout of engines/sampling/logprobs.py; logprobs
        and ranks are filled in if `details`.
        """
        scores = _with_adjacent_columns(scores)
        rows, vocab_size = scores.shape
        table = torch.empty(rows, _COLUMNS, dtype=torch.float64)
        sizes = rows, vocab_size, details, torch.get_num_threads()
        self.functions[scores.dtype](scores.data_ptr(), scores.stride(0), table.data_ptr(), *sizes)
        return table


class CpuGumbelMax:
    """A draw from softmax(scores / temperature) by the Gumbel-max trick, with the noise of
    engines/sampling/draws.py.
    """

    def __init__(self, kernels: CpuKernels) -> None:
        argtypes = [_POINTER, _INTEGER, _POINTER, _POINTER, _POINTER, _POINTER, _INTEGER, _INTEGER, _INTEGER]
        self.functions = kernels.functions("gumbel_max", argtypes)

    def __call__(self, scores: Tensor, max_scores: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
        """Token ids, int64 [b, 1]. `scores` [b, V]; the others [b, 1]: the highest score of each row, float32, its
        temperature, float64, and the key of its noise, int64.
        """
        scores = _with_adjacent_columns(scores)
        rows, vocab_size = scores.shape
        columns = [column.contiguous() for column in (max_scores, temperatures, keys)]
        assert [column.dtype for column in columns] == [torch.float32, torch.float64, torch.int64]
        assert all(column.shape == (rows, 1) for column in columns)
        token_ids = torch.empty_like(columns[-1])
        addresses = [column.data_ptr() for column in (*columns, token_ids)]
        sizes = rows, vocab_size, torch.get_num_threads()
        self.functions[scores.dtype](scores.data_ptr(), scores.stride(0), *addresses, *sizes)
        return token_ids


def _with_adjacent_columns(scores: Tensor) -> Tensor:
    return scores if scores.stride(1) == 1 else scores.contiguous()
