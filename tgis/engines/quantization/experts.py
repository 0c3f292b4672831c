"""Weights of experts that stay in the files of a checkpoint until they are packed, one layer after the other."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.engines.quantization.checkpoint import QuantizedLayer
from tgis.engines.quantization.weight import QuantizedWeight, concatenate


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A parameter with the weights of all experts."""

    parts: dict[str, Tensor | QuantizedLayer]  # name in the files -> part
    merge: Callable[[list[Tensor]], Tensor]  # what transformers makes of all parts

    def read(self, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        """The parameter, or its codes [experts * outputs, inputs]. Codes of several kinds are dequantized."""
        parts = [part.checked() if isinstance(part, QuantizedLayer) else part for part in self.parts.values()]
        coded = [part for part in parts if isinstance(part, QuantizedWeight)]
        if len(coded) == len(parts) and (codes := concatenate(coded, lambda x: self.merge(x).flatten(0, -2))):
            return codes
        return self.merge([part if isinstance(part, Tensor) else part.widened(dtype) for part in parts])

    def packed_bytes(self, weight: Tensor, bits: int | None) -> int:
        """The bytes of the packed weight: in `bits`, else in the dtype of the model or the files, the smaller one."""
        if bits is not None:
            return quantized_bytes(weight, bits)
        return sum(
            part.numel() * min(weight.itemsize, part.itemsize) if isinstance(part, Tensor) else part.num_bytes
            for part in self.parts.values()
        )


def quantized_bytes(weight: Tensor, bits: int) -> int:  # [..., inputs]
    """The bytes of a weight that is quantized while it is loaded."""
    return int(weight.numel() * (bits / 8 + (4 / weight.shape[-1] if bits == 8 else 4 / 32)))
