"""AWQ checkpoints in the layout named gemm: eight codes of 4 bits in an int32."""

from collections.abc import Mapping
from typing import Any

from tgis.engines.quantization.checkpoint import LayerTensors
from tgis.engines.quantization.gptq import affine_weight, group_size_of, packed, unpacked
from tgis.engines.quantization.weight import INT4, QuantizedWeight
from tgis.errors import StartError

_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # of the columns in an int32


class AwqFormat:
    """`qweight` int32 [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]: a weight is
    scale * (code - zero).
    """

    marks, others = frozenset({"qweight"}), frozenset({"qzeros", "scales"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm"))
        if bits != 4 or version.lower() != "gemm":
            raise StartError(f"awq with {bits!r:.20} bits, version {version:.20} is not supported")
        self._group_size = group_size_of(config)

    def shape(self, tensors: LayerTensors) -> tuple[int, int]:
        inputs, columns = tensors.shape("qweight")
        return 8 * columns, inputs

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        codes, zeros = (
            unpacked(packed(tensors, suffix), 4).unflatten(1, (-1, 8))[..., _NIBBLES].flatten(1)
            for suffix in ("qweight", "qzeros")
        )
        return affine_weight(tensors, codes.T.contiguous(), zeros, INT4, self._group_size)
