"""Find the ONNX graphs of a model, in the layouts that Optimum writes.

Decoder-only: `model.onnx`, which takes a past that may be empty; or `decoder_model_merged.onnx`; or a pair,
`decoder_model.onnx` for the first pass and `decoder_with_past_model.onnx` for all others. An encoder-decoder has
`encoder_model.onnx` and one of the latter two. They are in the model's directory or in `onnx` below it.
"""

from dataclasses import dataclass
from pathlib import Path

from tgis.errors import StartError, Unsupported

ENCODER, SINGLE_DECODER, MERGED_DECODER = "encoder_model.onnx", "model.onnx", "decoder_model_merged.onnx"
DECODER, DECODER_WITH_PAST = "decoder_model.onnx", "decoder_with_past_model.onnx"


@dataclass(frozen=True, slots=True)
class GraphFiles:
    """`decoder` and `decoder_with_past` may be the same file."""

    decoder: Path  # for the first pass
    decoder_with_past: Path  # for all others
    encoder: Path | None = None


def find_graphs(model: Path, *, encoder_decoder: bool) -> GraphFiles:
    """StartError names what is missing."""
    folder = model if any(model.glob("*.onnx")) or not (model / "onnx").is_dir() else model / "onnx"
    if not encoder_decoder:
        return _find_decoder(folder, (SINGLE_DECODER, MERGED_DECODER))
    if not (folder / ENCODER).is_file():
        raise StartError(f"{folder} has no {ENCODER}, which an encoder-decoder needs (see tgis convert-to-onnx)")
    decoder = _find_decoder(folder, (MERGED_DECODER,))
    return GraphFiles(decoder.decoder, decoder.decoder_with_past, folder / ENCODER)


def _find_decoder(folder: Path, alone: tuple[str, ...]) -> GraphFiles:
    for name in alone:
        if (folder / name).is_file():
            return GraphFiles(folder / name, folder / name)
    missing = [name for name in (DECODER, DECODER_WITH_PAST) if not (folder / name).is_file()]
    if len(missing) == 1:
        raise StartError(f"{folder} has no {missing[0]}, the other half of its decoder (see tgis convert-to-onnx)")
    if missing:
        wanted = " nor ".join((*alone, f"{DECODER} with {DECODER_WITH_PAST}"))
        raise Unsupported(f"{folder} has no ONNX graphs, neither {wanted}: tgis convert-to-onnx makes them")
    return GraphFiles(folder / DECODER, folder / DECODER_WITH_PAST)
