"""The winners of exponential races over whole vocabularies, in one pass over the scores, by race.c."""

import ctypes

import torch
from torch import Tensor

from tgis.engines.kernels.cpu.library import CpuKernels


class CpuRace:
    """Which token arrives first in each row."""

    dtypes = (torch.float32, torch.bfloat16)

    def __init__(self, kernels: CpuKernels) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        argtypes = [pointer, integer, pointer, pointer, pointer, pointer, integer, integer, integer]
        self._functions = {dtype: kernels.function("race", dtype, argtypes) for dtype in self.dtypes}

    def __call__(self, scores: Tensor, max_scores: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
        """Token ids, int64 [b, 1]. `scores` [b, V]; the others [b, 1]: float32, the highest score of each row, float64,
        and int64, the keys of the noise.
        """
        scores = scores if scores.stride(1) == 1 else scores.contiguous()
        rows, vocab_size = scores.shape
        columns = [column.contiguous() for column in (max_scores, temperatures, keys)]
        assert [column.dtype for column in columns] == [torch.float32, torch.float64, torch.int64]
        assert all(column.shape == (rows, 1) for column in columns)
        winners = torch.empty_like(columns[-1])
        addresses = [column.data_ptr() for column in (*columns, winners)]
        numbers = rows, vocab_size, torch.get_num_threads()
        self._functions[scores.dtype](scores.data_ptr(), scores.stride(0), *addresses, *numbers)
        return winners
