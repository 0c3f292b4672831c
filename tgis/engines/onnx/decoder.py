"""A decoder as one ONNX graph or two: passes over a block of rows, whatever the graphs call their inputs.

Names, head counts, sizes and dtypes come from the graphs; one that wants what nobody here can give is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tgis.engines.onnx.files import GraphFiles
from tgis.engines.onnx.kv_cache import PastKeyValues
from tgis.engines.onnx.session import Session
from tgis.errors import StartError

LOGITS, PAST_PREFIX, PRESENT_PREFIX, ENCODER_INFIX = "logits", "past_key_values.", "present.", ".encoder."
_PROBE_COLUMNS = 12  # columns
_PROBE_LENGTHS = ([_PROBE_COLUMNS - 1, _PROBE_COLUMNS // 2 - 1], [_PROBE_COLUMNS // 2 - 1])
_MAX_NOISE = 0.1  # of the logits' spread, which numbers of eight bits bring along
_KNOWN_INPUTS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache_branch",
    "encoder_hidden_states",
    "encoder_attention_mask",
}


@dataclass(frozen=True, slots=True)
class EncoderOutputs:
    """What a pass needs of the encoder."""

    attention_mask: Tensor  # int64 [rows, columns]
    hidden_states: Tensor  # [rows, columns, hidden]; only the first pass reads them
    past: PastKeyValues  # which the first pass fills


@dataclass(frozen=True, slots=True)
class Decoder:
    """The graphs, and the names of their states without what stands before them."""

    without_past: Session
    with_past: Session
    self_attention_names: tuple[str, ...]
    cross_attention_names: tuple[str, ...]

    @classmethod
    def load(cls, files: GraphFiles, device: torch.device, threads: int | None) -> Self:
        """StartError if a graph is not what it should be."""
        others = Session(files.decoder_with_past, device, threads)
        first = others if files.decoder == files.decoder_with_past else Session(files.decoder, device, threads)
        names = [name.removeprefix(PAST_PREFIX) for name in others.inputs if name.startswith(PAST_PREFIX)]
        if not names:
            raise StartError(f"{others.file} takes no {PAST_PREFIX}*: it was exported without the past")
        decoded = tuple(name for name in names if ENCODER_INFIX not in f".{name}")
        encoded = tuple(name for name in names if ENCODER_INFIX in f".{name}")
        decoder = cls(first, others, decoded, encoded)
        decoder._check_signatures()
        return decoder

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self.with_past.inputs[PAST_PREFIX + self.self_attention_names[0]].dtype

    @property
    def vocab_size(self) -> int:
        """How many logits a token gets."""
        return self.with_past.outputs[LOGITS].dim(2)

    @property
    def supports_chunked_prefill(self) -> bool:
        """Whether a prompt may be computed in several passes, as one graph made for that can."""
        return self.without_past is self.with_past and "use_cache_branch" not in self.with_past.inputs

    def bytes_per_token(self, names: tuple[str, ...]) -> int:
        """Of the states of these names."""
        ports = [self.with_past.inputs[PAST_PREFIX + name] for name in names]
        return sum(port.dim(1) * port.dim(3) * port.dtype.itemsize for port in ports)

    def empty_logits(self, rows: int, device: torch.device) -> Tensor:
        """Room for those of one token of each row, [rows, V]."""
        return torch.empty((rows, self.vocab_size), dtype=self.with_past.outputs[LOGITS].dtype, device=device)

    def empty_past(
        self, names: tuple[str, ...], seq_lens: list[int], device: torch.device, left_padded: bool
    ) -> PastKeyValues:
        """States of these names for rows of which nothing has been computed."""
        ports = [self.with_past.inputs[PAST_PREFIX + name] for name in names]
        shapes = [(len(seq_lens), port.dim(1), 0, port.dim(3)) for port in ports]
        tensors = [torch.empty(shape, dtype=self.dtype, device=device) for shape in shapes]
        return PastKeyValues(seq_lens, tensors, left_padded)

    def run(self, past: PastKeyValues, ids: Tensor, encoder_outputs: EncoderOutputs | None = None) -> Tensor:
        """Compute the next columns, ids [rows, columns], of rows of these lengths: their logits; the block grows."""
        beginning = past.columns == 0
        graph = self.without_past if beginning else self.with_past
        room = past.allocate(past.columns + ids.shape[1])
        logits = self.empty_logits(ids.numel(), ids.device).view(*ids.shape, -1)
        given = self._inputs(past, ids, encoder_outputs)
        wanted = {LOGITS: logits} | {
            PRESENT_PREFIX + name: tensor for name, tensor in zip(self.self_attention_names, room, strict=True)
        }
        if encoder_outputs is not None and beginning:
            filled = encoder_outputs.past.allocate(encoder_outputs.hidden_states.shape[1])
            wanted |= {
                PRESENT_PREFIX + name: tensor for name, tensor in zip(self.cross_attention_names, filled, strict=True)
            }
        graph.run(given, wanted)
        past.swap(room)
        if encoder_outputs is not None and beginning:
            encoder_outputs.past.swap(filled)
        return logits

    def _inputs(self, past: PastKeyValues, ids: Tensor, encoder_outputs: EncoderOutputs | None) -> dict[str, Tensor]:
        mask = past.attention_mask(past.columns + ids.shape[1]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :].contiguous()
        given = {
            "input_ids": ids.contiguous(),
            "attention_mask": mask.to(ids.device),
            "position_ids": positions.to(ids.device),
            "use_cache_branch": torch.tensor([past.columns > 0], device=ids.device),
        }
        given |= {
            PAST_PREFIX + name: tensor for name, tensor in zip(self.self_attention_names, past.tensors, strict=True)
        }
        if encoder_outputs is not None:
            given |= {
                PAST_PREFIX + name: tensor
                for name, tensor in zip(self.cross_attention_names, encoder_outputs.past.tensors, strict=True)
            }
            given |= {
                "encoder_hidden_states": encoder_outputs.hidden_states,
                "encoder_attention_mask": encoder_outputs.attention_mask,
            }
        return given

    def _check_signatures(self) -> None:
        for name in (*self.self_attention_names, *self.cross_attention_names):
            shape = self.with_past.inputs[PAST_PREFIX + name].shape
            if len(shape) != 4 or shape[1] is None or shape[3] is None:
                raise StartError(
                    f"{self.with_past.file}: {PAST_PREFIX}{name} is {shape}, not [rows, heads, columns, size]"
                )
        inputs = _KNOWN_INPUTS | {
            PAST_PREFIX + name for name in (*self.self_attention_names, *self.cross_attention_names)
        }
        outputs = {LOGITS: 3} | {PRESENT_PREFIX + name: 4 for name in self.self_attention_names}
        self.with_past.check_signature(inputs, outputs)
        self.without_past.check_signature(
            inputs, outputs | {PRESENT_PREFIX + name: 4 for name in self.cross_attention_names}
        )


def ignores_padding(
    decoder: Decoder, device: torch.device, encoder_outputs: Callable[[int], EncoderOutputs | None]
) -> bool:
    """Whether a row's logits are those that it gets without padding on its left; `cross` for so many rows.

    A graph that is told both what to see and where it stands need not be tried.
    """
    takes = decoder.with_past.inputs
    if "attention_mask" not in takes or "position_ids" in takes:
        return "attention_mask" in takes
    ids = torch.arange(4, 4 + _PROBE_COLUMNS, device=device).expand(2, -1)
    long, short = (
        decoder.empty_past(decoder.self_attention_names, list(lengths), device, left_padded=True)
        for lengths in _PROBE_LENGTHS
    )
    many, one = encoder_outputs(2), encoder_outputs(1)
    pairs = []
    for start, stop in (
        (0, _PROBE_COLUMNS - 1),
        (_PROBE_COLUMNS - 1, _PROBE_COLUMNS),
    ):  # a first pass, and one with a past
        beside = decoder.run(long, ids[:, start:stop], many)[1, -1]
        alone = decoder.run(short, ids[:1, max(start, _PROBE_COLUMNS // 2) : stop], one)[0, -1]
        pairs.append((beside, alone))
    return all(float((beside - alone).abs().max()) < _MAX_NOISE * float(alone.std()) for beside, alone in pairs)
