"""AWQ checkpoints in the layout named gemm: eight codes of 4 bits in an int32."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tgis.engines.quantization.checkpoint import LayerTensors
from tgis.engines.quantization.weight import INT4, QuantizedWeight
from tgis.errors import StartError

_SHIFTS = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)  # of the codes of eight columns


class AwqFormat:
    """`qweight` int32 [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]: a weight is
    scale * (code - zero).
    """

    required, optional = frozenset({"qweight", "qzeros", "scales"}), frozenset[str]()

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("bits") != 4 or config.get("version", "gemm") != "gemm":
            raise StartError(
                f"awq with {config.get('bits')!r:.20} bits, version {config.get('version')!r:.20} is unknown"
            )

    def shape(self, tensors: LayerTensors) -> tuple[int, int]:
        inputs, packed = tensors.shape("qweight")
        return 8 * packed, inputs

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        (outputs, inputs), scale = self.shape(tensors), tensors["scales"].float()
        groups = len(scale)
        if scale.shape != (groups, outputs) or inputs % groups:
            raise StartError(
                f"{tensors.name}: scales {[*scale.shape]} do not fit {outputs} outputs and {inputs} inputs"
            )
        zeros = _unpacked(tensors["qzeros"])
        if zeros.shape != scale.shape:
            raise StartError(f"{tensors.name}: qzeros are those of {[*zeros.shape]}, scales {[*scale.shape]}")
        codes = _unpacked(tensors["qweight"]).T.contiguous()
        return QuantizedWeight(codes, INT4, scale.T, -(scale * zeros).T, inputs // groups)


def _unpacked(packed: Tensor) -> Tensor:  # int32 [n, m] -> uint8 [n, 8 m]
    return (packed[..., None] >> _SHIFTS & 15).to(torch.uint8).flatten(1)
