"""The best token of each row of scores over whole vocabularies, by argmax.c."""

import ctypes

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels

_COLUMNS = 5  # of a table, as there


class CpuArgmax:
    """Of the tokens with the highest score the one with the lowest id."""

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, kernels: CpuKernels) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        argtypes = [pointer, integer, pointer, integer, integer, integer, integer]
        self._functions = {dtype: kernels.function("argmax", dtype, argtypes) for dtype in self.dtypes}

    def __call__(self, scores: Tensor, *, details: bool) -> Tensor:
        """Their table [b, 5], as engines/sampling/logprobs.py has it, of scores [b, V]; with logprobs and ranks if
        `details`.
        """
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        rows, vocab_size = scores.shape
        table = torch.empty(rows, _COLUMNS, dtype=torch.float64)
        numbers = rows, vocab_size, details, torch.get_num_threads()
        self._functions[scores.dtype](scores.data_ptr(), scores.stride(0), table.data_ptr(), *numbers)
        return table
