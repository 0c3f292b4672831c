"""A decoder of one ONNX graph or two, and the files that Optimum writes them to.

Decoder-only: `model.onnx`, which takes a past that may be empty; or `decoder_model_merged.onnx`; or a pair,
`decoder_model.onnx` for the first pass and `decoder_with_past_model.onnx` for all others. An encoder-decoder has
`encoder_model.onnx` and one of the latter two. They are in the model's directory or in `onnx` below it.

Names, head counts, head sizes and dtypes come from the graphs; a graph with unknown inputs is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tgis.engines.onnx.session import NodeArg, Session
from tgis.engines.padded.kv_cache import padding_mask
from tgis.engines.padded.model import token_positions
from tgis.errors import StartError, Unsupported

ENCODER, SINGLE_DECODER, MERGED_DECODER = "encoder_model.onnx", "model.onnx", "decoder_model_merged.onnx"
DECODER, DECODER_WITH_PAST = "decoder_model.onnx", "decoder_with_past_model.onnx"
LOGITS, PAST_PREFIX, PRESENT_PREFIX, ENCODER_INFIX = "logits", "past_key_values.", "present.", ".encoder."
_PROBE_COLUMNS = 12
_MAX_NOISE = 0.1  # error allowed to eight-bit quantization, in standard deviations of the logits
_KNOWN_INPUTS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "use_cache_branch",
    "encoder_hidden_states",
    "encoder_attention_mask",
}


@dataclass(frozen=True, slots=True)
class GraphFiles:
    """`decoder` and `decoder_with_past` may be the same file."""

    decoder: Path  # graph of the first pass
    decoder_with_past: Path  # graph of all other passes
    encoder: Path | None = None


def find_graphs(model: Path, *, encoder_decoder: bool) -> GraphFiles:
    """The graphs of a model; StartError names a missing one."""
    folder = model if any(model.glob("*.onnx")) or not (model / "onnx").is_dir() else model / "onnx"
    if not encoder_decoder:
        return _find_decoder(folder, (SINGLE_DECODER, MERGED_DECODER))
    if not (folder / ENCODER).is_file():
        raise StartError(f"{folder} has no {ENCODER}, which an encoder-decoder needs (see tgis convert-to-onnx)")
    decoder = _find_decoder(folder, (MERGED_DECODER,))
    return GraphFiles(decoder.decoder, decoder.decoder_with_past, folder / ENCODER)


def _find_decoder(folder: Path, single: tuple[str, ...]) -> GraphFiles:
    for name in single:
        if (folder / name).is_file():
            return GraphFiles(folder / name, folder / name)
    missing = [name for name in (DECODER, DECODER_WITH_PAST) if not (folder / name).is_file()]
    if len(missing) == 1:
        raise StartError(f"{folder} has no {missing[0]}, the other half of its decoder (see tgis convert-to-onnx)")
    if missing:
        wanted = " nor ".join((*single, f"{DECODER} with {DECODER_WITH_PAST}"))
        raise Unsupported(f"{folder} has no ONNX graphs, neither {wanted}: tgis convert-to-onnx makes them")
    return GraphFiles(folder / DECODER, folder / DECODER_WITH_PAST)


@dataclass(frozen=True, slots=True)
class EncoderOutputs:
    """The encoder's outputs as a pass of the decoder takes them."""

    attention_mask: Tensor  # bool [rows, columns]
    hidden_states: Tensor  # [rows, columns, H]; only the first pass reads them
    past: list[Tensor]  # keys and values of cross-attention, which the first pass fills


class Decoder:
    """The graphs, and the names of their KV cache tensors, less the prefixes."""

    def __init__(self, files: GraphFiles, device: torch.device, threads: int) -> None:
        """StartError if a graph is not supported."""
        self.device = device
        self.with_past = Session(files.decoder_with_past, device, threads)
        same = files.decoder == files.decoder_with_past
        self.without_past = self.with_past if same else Session(files.decoder, device, threads)
        names = [name.removeprefix(PAST_PREFIX) for name in self.with_past.inputs if name.startswith(PAST_PREFIX)]
        if not names:
            raise StartError(f"{self.with_past.file} takes no {PAST_PREFIX}*: it was exported without the past")
        self.self_attention_names = tuple(name for name in names if ENCODER_INFIX not in f".{name}")
        self.cross_attention_names = tuple(name for name in names if ENCODER_INFIX in f".{name}")
        self._check_signatures()
        self.dtype, self.vocab_size = self._past_node(names[0]).dtype, self.with_past.outputs[LOGITS].dim(2)
        # A single graph with any past can compute a prompt in several passes.
        self.supports_chunked_prefill = same and "use_cache_branch" not in self.with_past.inputs

    def run(self, past: list[Tensor], ids: Tensor, mask: Tensor, encoder: EncoderOutputs | None = None) -> Tensor:
        """The logits of the next columns, ids [rows, columns], after this `past`, which grows; the mask is of all."""
        is_first = past[0].shape[2] == 0
        session = self.without_past if is_first else self.with_past
        present = self.new_past(self.self_attention_names, len(ids), mask.shape[1])
        logits_dtype = self.with_past.outputs[LOGITS].dtype
        logits = torch.empty((*ids.shape, self.vocab_size), dtype=logits_dtype, device=self.device)
        outputs = {LOGITS: logits} | _named(PRESENT_PREFIX, self.self_attention_names, present)
        inputs = self._inputs(past, ids, mask)
        if encoder is not None:
            inputs |= _named(PAST_PREFIX, self.cross_attention_names, encoder.past)
            inputs["encoder_hidden_states"] = encoder.hidden_states
            inputs["encoder_attention_mask"] = encoder.attention_mask.long().to(self.device)
            if is_first:
                columns = encoder.hidden_states.shape[1]
                encoder.past[:] = self.new_past(self.cross_attention_names, len(ids), columns)
                outputs |= _named(PRESENT_PREFIX, self.cross_attention_names, encoder.past)
        session.run(inputs, outputs)
        past[:] = present
        return logits

    def _inputs(self, past: list[Tensor], ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        positions = token_positions(mask, ids).contiguous()
        return {
            "input_ids": ids.contiguous(),
            "attention_mask": mask.long().to(self.device),
            "position_ids": positions.to(self.device),
            "use_cache_branch": torch.tensor([past[0].shape[2] > 0], device=self.device),
        } | _named(PAST_PREFIX, self.self_attention_names, past)

    def new_past(self, names: tuple[str, ...], rows: int, columns: int = 0) -> list[Tensor]:
        """Uninitialized keys and values [rows, heads, columns, head size] of these names."""
        shapes = [(rows, node.dim(1), columns, node.dim(3)) for node in map(self._past_node, names)]
        return [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]

    def _past_node(self, name: str) -> NodeArg:
        return self.with_past.inputs[PAST_PREFIX + name]

    def _check_signatures(self) -> None:
        names = (*self.self_attention_names, *self.cross_attention_names)
        for name in names:
            shape = self._past_node(name).shape
            if len(shape) != 4 or shape[1] is None or shape[3] is None:
                raise StartError(
                    f"{self.with_past.file}: {PAST_PREFIX}{name} is {shape}, not [rows, heads, columns, size]"
                )
        inputs = _KNOWN_INPUTS | {PAST_PREFIX + name for name in names}
        outputs = {LOGITS: 3} | {PRESENT_PREFIX + name: 4 for name in self.self_attention_names}
        self.with_past.check_signature(inputs, outputs)
        outputs |= {PRESENT_PREFIX + name: 4 for name in self.cross_attention_names}
        self.without_past.check_signature(inputs, outputs)


def _named(prefix: str, names: tuple[str, ...], tensors: list[Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in zip(names, tensors, strict=True)}


def ignores_padding(decoder: Decoder, encoder_outputs: Callable[[int], EncoderOutputs | None]) -> bool:
    """Whether padding on the left changes nothing; `encoder_outputs` makes the encoder's outputs for a number of rows.

    A graph that takes both a mask and positions ignores it.
    """
    takes = decoder.with_past.inputs
    if "attention_mask" not in takes or "position_ids" in takes:
        return "attention_mask" in takes
    ids = torch.arange(4, 4 + _PROBE_COLUMNS, device=decoder.device).expand(2, -1)
    encoded = [encoder_outputs(rows) for rows in (2, 1)]
    padded, alone = (decoder.new_past(decoder.self_attention_names, rows) for rows in (2, 1))
    half = _PROBE_COLUMNS // 2
    for start, stop in ((0, _PROBE_COLUMNS - 1), (_PROBE_COLUMNS - 1, _PROBE_COLUMNS)):  # without past, and with it
        both = decoder.run(padded, ids[:, start:stop], padding_mask([_PROBE_COLUMNS, half], stop), encoded[0])[1, -1]
        start = max(start, half)
        expected = decoder.run(alone, ids[:1, start:stop], padding_mask([half], stop - half), encoded[1])[0, -1]
        if not float((both - expected).abs().max()) < _MAX_NOISE * float(expected.std()):
            return False
    return True
