"""Checkpoints of bitsandbytes: int8, NF4 and FP4."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from tgis.engines.quantization.checkpoint import LayerTensors, Size
from tgis.engines.quantization.weight import FP4, INT8, NF4, QuantizedWeight
from tgis.errors import StartError

_STATE = "weight.quant_state.bitsandbytes__"
_TABLES = {"nf4": NF4, "fp4": FP4}
_MAX_STATE = 4096  # bytes of JSON


class _State(msgspec.Struct):
    """What bitsandbytes writes as JSON, in a tensor."""

    shape: tuple[Size, Size]
    blocksize: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096]
    nested_blocksize: Size = 256
    nested_offset: float = 0.0


class BitsAndBytesFormat:
    """`weight` int8 [out, in] and `SCB` [out], what the code 127 stands for; or `weight` of two codes in a byte, the
    first in its high half, and `weight.absmax` of blocks of the flat weight, which may be in 8 bits itself.
    """

    marks = frozenset({"SCB", "weight.absmax"})
    others = frozenset(
        {"weight", "weight_format", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"}
        | {_STATE + name for name in _TABLES}
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Everything that matters is in the tensors."""

    def shape(self, tensors: LayerTensors) -> tuple[int, int]:
        return tensors.shape("weight") if "SCB" in tensors else _state(tensors)[0].shape

    def read(self, tensors: LayerTensors) -> QuantizedWeight:
        if "SCB" not in tensors:
            return _of_4_bits(tensors)
        if "weight_format" in tensors and tensors["weight_format"].any():
            raise StartError(f"{tensors.name}: the weight is not stored in rows")
        codes, shape = tensors.codes(torch.int8), self.shape(tensors)
        return QuantizedWeight(codes, INT8, tensors.numbers("SCB", shape, (1, shape[1])) / 127)


def _state(tensors: LayerTensors) -> tuple[_State, Tensor]:
    """What describes a weight of 4 bits, and its table."""
    for name, table in _TABLES.items():
        if (raw := tensors.get(_STATE + name)) is None:
            continue
        if raw.nbytes > _MAX_STATE:
            raise StartError(f"{tensors.name}: quant_state has {raw.nbytes} bytes, at most {_MAX_STATE} may be")
        try:
            state = msgspec.json.decode(raw.numpy().tobytes(), type=_State)
        except msgspec.DecodeError as error:
            raise StartError(f"{tensors.name}: quant_state: {error}") from error
        return state, table
    raise StartError(f"{tensors.name} has no quant_state of {' or '.join(_TABLES)}")


def _of_4_bits(tensors: LayerTensors) -> QuantizedWeight:
    state, table = _state(tensors)
    (outputs, inputs), count = state.shape, math.prod(state.shape)
    octets = _octets(tensors, "weight", -(-count // 2))
    found = tensors.numbers("weight.quant_map", (1, 16), (1, 1))
    if not torch.allclose(found, table, atol=1e-6):
        raise StartError(f"{tensors.name}: weight.quant_map is not that of its quant_state")
    codes = torch.stack([octets >> 4, octets & 15], -1).flatten()[:count].view(outputs, inputs)
    size = math.gcd(state.blocksize, inputs)  # where blocks go on in the next row
    scale = _absmax(tensors, state, count).repeat_interleave(state.blocksize // size)[: count // size]
    return QuantizedWeight(codes, table, scale.view(outputs, -1), None, None if size == inputs else size)


def _octets(tensors: LayerTensors, suffix: str, count: int) -> Tensor:  # uint8 [count]
    octets = tensors[suffix].flatten().view(torch.uint8)
    if len(octets) != count:
        raise StartError(f"{tensors.name}: {suffix} has {len(octets)} bytes, not {count}")
    return octets


def _absmax(tensors: LayerTensors, state: _State, count: int) -> Tensor:  # float32 [blocks]
    if "weight.nested_absmax" not in tensors:
        return tensors.numbers("weight.absmax", (1, count), (1, state.blocksize))[0]
    blocks = -(-count // state.blocksize)
    codes = _octets(tensors, "weight.absmax", blocks)
    of_blocks = tensors.numbers("weight.nested_absmax", (1, blocks), (1, state.nested_blocksize))[0]
    table = tensors.numbers("weight.nested_quant_map", (1, 256), (1, 1))[0]
    largest = of_blocks.repeat_interleave(min(state.nested_blocksize, blocks))[:blocks]
    return table[codes.int()] * largest + state.nested_offset
