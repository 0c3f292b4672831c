"""A decoder as one ONNX graph or two: passes over a block of rows, whatever the graphs call their inputs.

Names, head counts, sizes and dtypes come from the graphs; one that wants what nobody here can give is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tgis.engines.onnx.files import GraphFiles
from tgis.engines.onnx.kv_cache import Block
from tgis.engines.onnx.session import Graph
from tgis.errors import StartError

LOGITS, PAST, PRESENT, ENCODER = "logits", "past_key_values.", "present.", ".encoder."
_PROBE = 12  # columns
_PROBES = ([_PROBE - 1, _PROBE // 2 - 1], [_PROBE // 2 - 1])
_NOISE = 0.1  # of the logits' spread, which numbers of eight bits bring along
_KNOWN = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache_branch",
    "encoder_hidden_states",
    "encoder_attention_mask",
}


@dataclass(frozen=True, slots=True)
class Cross:
    """What a pass needs of the encoder."""

    mask: Tensor  # int64 [rows, columns]
    states: Tensor  # [rows, columns, hidden]; only the first pass reads them
    block: Block  # which the first pass fills


@dataclass(frozen=True, slots=True)
class Decoder:
    """The graphs, and the names of their states without what stands before them."""

    first: Graph
    others: Graph
    decoded: tuple[str, ...]
    encoded: tuple[str, ...]

    @classmethod
    def load(cls, files: GraphFiles, device: torch.device, threads: int | None) -> Self:
        """StartError if a graph is not what it should be."""
        others = Graph(files.others, device, threads)
        first = others if files.first == files.others else Graph(files.first, device, threads)
        names = [name.removeprefix(PAST) for name in others.inputs if name.startswith(PAST)]
        if not names:
            raise StartError(f"{others.file} takes no {PAST}*: it was exported without the past")
        decoded = tuple(name for name in names if ENCODER not in f".{name}")
        encoded = tuple(name for name in names if ENCODER in f".{name}")
        decoder = cls(first, others, decoded, encoded)
        decoder._check()
        return decoder

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.others.inputs[PAST + self.decoded[0]].dtype

    @property
    def vocabulary(self) -> int:
        """How many logits a token gets."""
        return self.others.outputs[LOGITS].size(2)

    @property
    def reads_past_in_pieces(self) -> bool:
        """Whether a prompt may be computed in several passes, as one graph made for that can."""
        return self.first is self.others and "use_cache_branch" not in self.others.inputs

    def bytes_per_token(self, names: tuple[str, ...]) -> int:
        """Of the states of these names."""
        ports = [self.others.inputs[PAST + name] for name in names]
        return sum(port.size(1) * port.size(3) * port.dtype.itemsize for port in ports)

    def logits(self, rows: int, device: torch.device) -> Tensor:
        """Room for those of one token of each row, [rows, V]."""
        return torch.empty((rows, self.vocabulary), dtype=self.others.outputs[LOGITS].dtype, device=device)

    def block(self, names: tuple[str, ...], lengths: list[int], device: torch.device, padded_left: bool) -> Block:
        """States of these names for rows of which nothing has been computed."""
        ports = [self.others.inputs[PAST + name] for name in names]
        shapes = [(len(lengths), port.size(1), 0, port.size(3)) for port in ports]
        tensors = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]
        return Block(lengths, tensors, padded_left)

    def run(self, block: Block, ids: Tensor, cross: Cross | None = None) -> Tensor:
        """Compute the next columns, ids [rows, columns], of rows of these lengths: their logits; the block grows."""
        beginning = block.columns == 0
        graph = self.first if beginning else self.others
        room = block.room(block.columns + ids.shape[1])
        logits = self.logits(ids.numel(), ids.device).view(*ids.shape, -1)
        given = self._given(block, ids, cross)
        wanted = {LOGITS: logits} | {PRESENT + name: tensor for name, tensor in zip(self.decoded, room, strict=True)}
        if cross is not None and beginning:
            filled = cross.block.room(cross.states.shape[1])
            wanted |= {PRESENT + name: tensor for name, tensor in zip(self.encoded, filled, strict=True)}
        graph.run(given, wanted)
        block.advance(room)
        if cross is not None and beginning:
            cross.block.advance(filled)
        return logits

    def _given(self, block: Block, ids: Tensor, cross: Cross | None) -> dict[str, Tensor]:
        mask = block.mask(block.columns + ids.shape[1]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :].contiguous()
        given = {
            "input_ids": ids.contiguous(),
            "attention_mask": mask.to(ids.device),
            "position_ids": positions.to(ids.device),
            "use_cache_branch": torch.tensor([block.columns > 0], device=ids.device),
        }
        given |= {PAST + name: tensor for name, tensor in zip(self.decoded, block.tensors, strict=True)}
        if cross is not None:
            given |= {PAST + name: tensor for name, tensor in zip(self.encoded, cross.block.tensors, strict=True)}
            given |= {"encoder_hidden_states": cross.states, "encoder_attention_mask": cross.mask}
        return given

    def _check(self) -> None:
        for name in (*self.decoded, *self.encoded):
            shape = self.others.inputs[PAST + name].shape
            if len(shape) != 4 or shape[1] is None or shape[3] is None:
                raise StartError(f"{self.others.file}: {PAST}{name} is {shape}, not [rows, heads, columns, size]")
        inputs = _KNOWN | {PAST + name for name in (*self.decoded, *self.encoded)}
        outputs = {LOGITS: 3} | {PRESENT + name: 4 for name in self.decoded}
        self.others.expect(inputs, outputs)
        self.first.expect(inputs, outputs | {PRESENT + name: 4 for name in self.encoded})


def ignores_padding(decoder: Decoder, device: torch.device, cross: Callable[[int], Cross | None]) -> bool:
    """Whether a row's logits are those that it gets without padding on its left; `cross` for so many rows.

    A graph that is told both what to see and where it stands need not be tried.
    """
    takes = decoder.others.inputs
    if "attention_mask" not in takes or "position_ids" in takes:
        return "attention_mask" in takes
    ids = torch.arange(4, 4 + _PROBE, device=device).expand(2, -1)
    long, short = (decoder.block(decoder.decoded, list(lengths), device, padded_left=True) for lengths in _PROBES)
    many, one = cross(2), cross(1)
    pairs = []
    for start, stop in ((0, _PROBE - 1), (_PROBE - 1, _PROBE)):  # a first pass, and one with a past
        beside = decoder.run(long, ids[:, start:stop], many)[1, -1]
        alone = decoder.run(short, ids[:1, max(start, _PROBE // 2) : stop], one)[0, -1]
        pairs.append((beside, alone))
    return all(float((beside - alone).abs().max()) < _NOISE * float(alone.std()) for beside, alone in pairs)
