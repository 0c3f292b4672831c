"""Experts in MXFP4, as gpt-oss has them: blocks of 32 values in 4 bits with a power of two as scale. Our kernels
multiply by the codes; without them a model that is loaded has widened weights, each rank its part.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgis.engines.quantization.checkpoint import QuantizedLayer, read_tensors
from tgis.engines.quantization.weight import E2M1, QuantizedWeight
from tgis.errors import StartError

_BLOCK = 32
_BIAS = 127  # bias of exponents


def widened_tensors(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    """The tensors of a model by name, for transformers, which takes parts of those that are not read yet."""
    tensors: dict[str, Any] = dict(read_tensors(path)[0])
    for name in [name for name in tensors if name.endswith("_blocks")]:
        layer = name.removesuffix("_blocks")
        codes, exponents = tensors.pop(name), tensors.pop(f"{layer}_scales", None)
        if exponents is None or codes.dtype != torch.uint8 or codes.shape != (*exponents.shape, _BLOCK // 2):
            raise StartError(f"{path}: {name} is {codes.dtype} {[*codes.shape]}, which {layer}_scales do not fit")
        tensors[layer] = _Widened(codes, exponents, dtype)
    return tensors


def coded_tensors(path: Path) -> dict[str, Tensor | QuantizedLayer]:
    """The tensors of a model by name, with the codes of experts."""
    tensors = widened_tensors(path, torch.bfloat16).items()
    return {name: tensor.layer(name) if isinstance(tensor, _Widened) else tensor for name, tensor in tensors}


class _Widened:
    """A weight [experts, inputs, outputs], of which parts are read as of a tensor in a file."""

    def __init__(self, codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> None:
        """Codes [experts, outputs, groups, 16], two in each, and exponents [experts, outputs, groups]."""
        self._codes, self._exponents, self._dtype = codes, exponents, dtype

    def layer(self, name: str) -> QuantizedLayer:
        """The codes [experts * outputs, inputs]."""
        experts, inputs, outputs = self.get_shape()
        size = experts * outputs * inputs * 9 // 16  # scales are packed in bfloat16
        return QuantizedLayer(name, (experts * outputs, inputs), size, partial(self._coded, slice(None)))

    def _coded(self, experts: slice) -> QuantizedWeight:
        """The codes [experts * outputs, inputs] of some experts."""
        exponents = self._exponents[experts].flatten(0, 1).int() - _BIAS
        scale = torch.ldexp(torch.ones(exponents.shape), exponents).bfloat16()
        codes = _nibbles(self._codes[experts]).flatten(2).flatten(0, 1)
        return QuantizedWeight(codes, E2M1, scale, None, _BLOCK)

    def get_shape(self) -> list[int]:
        experts, outputs, groups = self._exponents.shape
        return [experts, groups * _BLOCK, outputs]

    def __getitem__(self, part: Any) -> Tensor:
        """The part for slices of experts, inputs and outputs, or all of it for `...`."""
        bounds = [slice(None)] * 3 if part is ... else part
        experts, inputs, outputs = (range(size)[bound] for bound, size in zip(bounds, self.get_shape(), strict=True))
        result = torch.empty(len(experts), len(inputs), len(outputs), dtype=self._dtype)
        for weight, expert in zip(result, experts, strict=True):
            widened = self._coded(slice(expert, expert + 1)).dequantized()
            weight.copy_(widened.T[inputs.start : inputs.stop, outputs.start : outputs.stop])
        return result


def _nibbles(codes: Tensor) -> Tensor:  # [..., n] -> [..., 2 n]
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
