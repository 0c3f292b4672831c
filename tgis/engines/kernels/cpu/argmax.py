"""The best token of each row of scores over whole vocabularies, by argmax.c."""

import ctypes

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels


class CpuArgmax:
    """The highest score, and of the tokens that have it the one with the lowest id."""

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, kernels: CpuKernels) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        argtypes = [pointer, integer, pointer, pointer, integer, integer, integer]
        self._functions = {dtype: kernels.function("argmax", dtype, argtypes) for dtype in self.dtypes}

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Of scores [b, V]: float32, NaN where a score of the row is, and int64, each [b, 1]."""
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        rows, vocab_size = scores.shape
        highest = torch.empty(rows, 1)
        ids = torch.empty(rows, 1, dtype=torch.int64)
        addresses = scores.data_ptr(), scores.stride(0), highest.data_ptr(), ids.data_ptr()
        self._functions[scores.dtype](*addresses, rows, vocab_size, torch.get_num_threads())
        return highest, ids
