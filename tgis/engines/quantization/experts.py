"""Weights of experts that stay in the files of a checkpoint until they are packed, one expert after the other."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tgis.engines.quantization.checkpoint import QuantizedLayer
from tgis.engines.quantization.weight import QuantizedWeight, concatenate
from tgis.errors import StartError


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A parameter [experts, outputs, inputs] of a module, or [experts, inputs, outputs] if that is transposed."""

    parts: list[list[tuple[str, Tensor | QuantizedLayer]]]  # by expert, with names: concatenated along rows

    @property
    def names(self) -> set[str]:
        """The tensors in the files."""
        return {name for parts in self.parts for name, _ in parts}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of all parts."""
        return [tuple(part.shape) for parts in self.parts for _, part in parts]

    def expert(self, index: int, dtype: torch.dtype) -> Tensor | QuantizedWeight:
        """The weight of an expert as in the files, but codes of several kinds are dequantized; StartError if it is not
        finite as `dtype`.
        """
        weights = [_checked(name, part, dtype) for name, part in self.parts[index]]
        coded = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
        if len(coded) == len(weights) and (together := concatenate(coded)) is not None:
            return together
        return torch.cat([weight if isinstance(weight, Tensor) else weight.dequantized() for weight in weights])

    def packed_bytes(self, weight: Tensor, bits: int | None) -> int:
        """The bytes of the packed weight: in `bits`, else in the dtype of the model or the files, the smaller one."""
        if bits is not None:
            return quantized_bytes(weight, bits)
        parts = [part for parts in self.parts for _, part in parts]
        size = weight.itemsize
        return sum(
            part.numel() * min(size, part.itemsize) if isinstance(part, Tensor) else part.num_bytes for part in parts
        )


def _checked(name: str, part: Tensor | QuantizedLayer, dtype: torch.dtype) -> Tensor | QuantizedWeight:
    if isinstance(part, QuantizedLayer):
        return part.checked()
    if not torch.stack(torch.aminmax(part)).to(dtype).isfinite().all():
        raise StartError(f"the weight {name} has values that are NaN or infinite as {dtype}")
    return part


def quantized_bytes(weight: Tensor, bits: int) -> int:  # [..., inputs]
    """The bytes of a weight that is quantized while it is loaded."""
    return int(weight.numel() * (bits / 8 + (4 / weight.shape[-1] if bits == 8 else 4 / 32)))


def stored_weights(model: nn.Module) -> dict[str, StoredWeight]:
    """The stored weights of all experts of a model, by name of parameter."""
    modules: Any = model.named_modules()
    return {f"{path}.{name}": x for path, module in modules for name, x in getattr(module, "stored", {}).items()}
