"""Codes in int32s: GPTQ with 4 and 8 bits, as AutoGPTQ, GPTQModel, auto-round and TGIS write it, and AWQ in the layout
named gemm.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tgis.engines.quantization.checkpoint import LayerTensors
from tgis.engines.quantization.weight import INT4, INT8, QuantizedWeight
from tgis.errors import StartError

_ONES = {4: 0x11111111, 8: 0x01010101}  # one in each code of an int32
_VERSIONS = ("gptq", "gptq_v2")
_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # order of the columns in an int32 of AWQ


class GptqFormat:
    """`qweight` int32 [in * bits / 32, out], lowest bits first; `qzeros` [groups, out * bits / 32]; `scales` [groups,
    out]; `g_idx` [in], the group of each input, in any order (act-order). A weight is scale * (code - zero); files of
    version 1 store zero - 1.
    """

    marks, others = frozenset({"qweight"}), frozenset({"qzeros", "scales", "g_idx"})

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits, version = config.get("bits"), config.get("checkpoint_format") or "gptq"
        version = "marlin" if config.get("is_marlin_format") else version
        if bits not in tuple(_ONES) or version not in _VERSIONS:
            raise StartError(f"gptq with {bits!r:.20} bits, checkpoint_format {version!r:.20} is not supported")
        self._bits, self._group_size = int(bits), group_size_of(config)
        self._version_2, self._symmetric = version == "gptq_v2", config.get("sym", True)

    def shape(self, tensors: LayerTensors) -> tuple[int, int]:
        words, outputs = tensors.shape("qweight")
        return outputs, words * 32 // self._bits

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        codes = unpacked(tensors.words("qweight").T, self._bits)
        order = column_order(tensors, "g_idx", codes.shape[1], self._group_size)
        codes = codes if order is None else codes[:, order]
        table = INT4 if self._bits == 4 else INT8
        scale, offset = scale_and_offset(tensors, self._zeros(tensors), table)
        return QuantizedWeight(codes, table, scale, offset, self._group_size, order)

    def _zeros(self, tensors: LayerTensors) -> Tensor:
        stored = tensors.words("qzeros")
        zeros = unpacked(stored, self._bits)
        # of symmetric weights the middle: some say version 1 and store it as it is
        if self._version_2 or (self._symmetric and (zeros == 1 << self._bits - 1).all()):
            return zeros
        return unpacked(stored + _ONES[self._bits], self._bits)  # GPTQModel subtracts them from the int32, too


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
        inputs, words = tensors.shape("qweight")
        return 8 * words, inputs

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        codes, zeros = (
            unpacked(tensors.words(suffix), 4).unflatten(1, (-1, 8))[..., _NIBBLES].flatten(1)
            for suffix in ("qweight", "qzeros")
        )
        return QuantizedWeight(codes.T.contiguous(), INT4, *scale_and_offset(tensors, zeros, INT4), self._group_size)


def tgis_description(path: Path) -> dict[str, Any] | None:
    """What the tensors `gptq_bits` and `gptq_groupsize` say that TGIS adds to weights that it quantized."""
    for file in path.glob("*.safetensors"):
        tensors: Any = safe_open(file, "pt")
        if {"gptq_bits", "gptq_groupsize"} <= set(tensors.keys()):
            bits, size = (int(tensors.get_tensor(name)) for name in ("gptq_bits", "gptq_groupsize"))
            return {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False}
    return None


def group_size_of(config: Mapping[str, Any]) -> int | None:
    """The inputs of a group; None: all of a layer."""
    size = config.get("group_size", config.get("q_group_size", -1))
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise StartError(f"quantization_config: group_size is {size!r:.20}, not -1 or at least 1")
    return None if size == -1 else size


def unpacked(packed: Tensor, bits: int) -> Tensor:  # int32 [n, m] -> uint8 [n, m * 32 / bits]
    """The codes in each int32, from the lowest bits to the highest."""
    octets = packed.flatten().view(torch.uint8).view(packed.shape[0], 4 * packed.shape[1])
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def column_order(tensors: LayerTensors, suffix: str, inputs: int, group_size: int | None) -> Tensor | None:
    """The inputs in the order of their groups, which a tensor has; None if they are in this order already."""
    groups, size = tensors.get(suffix), group_size or inputs
    if groups is None or not groups.any():
        return None
    if groups.shape != (inputs,):
        raise StartError(f"{tensors.name}: {suffix} has the shape {[*groups.shape]}, not {[inputs]}")
    in_order = torch.arange(inputs)
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), in_order // size):
        bounds = f"{groups.min()} to {groups.max()}"
        raise StartError(f"{tensors.name}: {suffix} {bounds} of {inputs} inputs is not {size} inputs for each group")
    return None if torch.equal(order, in_order) else order


def scale_and_offset(tensors: LayerTensors, zeros: Tensor, table: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale and offset [out, groups] of a weight scale * (code - zero), from `scales` and zeros [groups, out]."""
    scale = tensors["scales"].float()
    if zeros.shape != scale.shape:
        raise StartError(f"{tensors.name}: qzeros are those of {[*zeros.shape]}, scales {[*scale.shape]}")
    offset = scale * (-table[0] - zeros)
    return scale.T, offset.T if offset.any() else None
