"""Readers of what others write, each as a function of bytes for a fuzzer.

On any bytes they return or raise an exception of tgis/errors.py whose text is one line; what they return must hold
what their callers rely on.
"""

import contextlib
import functools
import io
import math
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from batches import engine_options
from transformers import PreTrainedConfig

from tgis.api.grpc import convert
from tgis.api.grpc.parsing import parse
from tgis.engines.quantization.config import resolve_quantization
from tgis.errors import RequestError, TgisError, library_errors
from tgis.frontend.calls import GenerateCall
from tgis.frontend.validation import RequestLimits, make_request, validate
from tgis.ipc.channel import FrameReader, encode_frame
from tgis.ipc.messages import FromEngine, Submit, ToEngine
from tgis.pb import generation_pb2 as pb
from tgis.prompts.files import CONFIG, DECODER, ENCODER, PICKLE, SAFETENSORS, find_directory
from tgis.prompts.store import read_adapter
from tgis.prompts.tensor_file import TargetModel

SEPARATOR = b"\n\xff\n"  # between the files of an input
MAX_LENGTH, MAX_NEW, MAX_INPUTS = 64, 60, 100
ADAPTER_BYTES = 1 << 16
_LINEARS = {"model.layers.0.q_proj": (16, 24), "model.layers.0.up_proj": (16, 40)}
_TARGET = TargetModel(16, 8, torch.float32, torch.device("cpu"), encoder_decoder=None, lora_targets=_LINEARS)
_WIDTHS = {"I8": 1, "U8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "I64": 8}  # of safetensors
_MAX_TENSORS = 1 << 16  # bytes
_MAX_ERROR = 2000  # characters: errors quote what they are about, but not all of it


def frames(data: bytes) -> None:
    """Framing: what can be decoded says the same when it is sent again, however the stream is cut."""
    kind = FromEngine if data[:1] > b"\x7f" else ToEngine
    pieces = [data[1:][at : at + 7] for at in range(0, len(data), 7)]
    whole, cut = _resent(kind, [data[1:]]), _resent(kind, pieces)
    assert whole == cut
    assert whole is None or _resent(kind, whole) == whole


def _resent(kind: Any, pieces: list[bytes]) -> list[bytes] | None:
    """The frames of the messages that were received; None if something is corrupt, which ends the process."""
    reader = FrameReader(kind)
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, AssertionError):
        return [encode_frame(message) for piece in pieces for message in reader.feed(piece)]
    return None


def requests(data: bytes) -> None:
    """Conversion and validation: what gets through is within the limits, and can be sent to the engine."""
    with _tgis_errors():
        match data[:1]:
            case b"\0":
                single = parse(data[1:], pb.SingleGenerationRequest, 1)
                _validate(convert.generate_call(single, b"", b"", ()))
            case b"\1":
                texts = parse(data[1:], pb.BatchedTokenizeRequest, MAX_INPUTS)
                convert.tokenize_call(texts, 1 << 24)
            case _:
                batch = parse(data[1:], pb.BatchedGenerationRequest, MAX_INPUTS)
                _validate(convert.generate_call(batch, b"", b"", ()))


def _validate(call: GenerateCall) -> None:
    limits = RequestLimits(MAX_LENGTH, MAX_NEW, include_stop_sequence=True, input_vocab_size=257)
    params = call.params
    validate(params, limits)
    for text, field in zip(call.texts, call.fields, strict=False):
        tokens = list(text.encode())
        with contextlib.suppress(RequestError):
            sampling = params.sampling_params(7)
            request = make_request(tokens, None, params, limits, field, id=1, sampling_params=sampling)
            assert 1 <= request.max_new_tokens <= MAX_LENGTH - len(request.tokens)
            assert sampling.min_new_tokens <= request.max_new_tokens
            assert math.isfinite(sampling.temperature + sampling.top_p + sampling.typical_p)
            assert 0 < sampling.repetition_penalty < math.inf
            assert request.logprob_options.top_n_tokens <= limits.max_top_n_tokens
            (sent,) = FrameReader(ToEngine).feed(encode_frame(Submit([request], 0.0)))
            assert sent.requests == [request]


def adapters(data: bytes) -> None:
    """The files of an adapter: one that is accepted is finite, and not larger than the limit."""
    layout, described, (settings, *rest) = data[:1], data[1:2], data[2:].split(SEPARATOR, 1)
    tensors = b"".join(rest)
    content = _torch_archive(tensors) if described == b"\1" else tensors
    name = {b"\0": DECODER, b"\1": ENCODER, b"\2": PICKLE}.get(layout, SAFETENSORS)
    with _directory({CONFIG: settings, name: content}) as path, _tgis_errors():
        adapter = read_adapter(find_directory(None, {"a": str(path)}, "a"), ADAPTER_BYTES, _TARGET, 1)
        assert adapter.size <= 2 * ADAPTER_BYTES + 512 * len(_LINEARS) * 2, "larger than float16 in float32"


def _torch_archive(pickled: bytes) -> bytes:
    """The archive of torch.save with this description of tensors: a fuzzer cannot make checksums."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {"data.pkl": pickled, "data/0": bytes(256), "data/1": bytes(64)}.items():
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def quantized(data: bytes) -> None:
    """A quantized checkpoint: codes, scales and offsets of its layers fit together."""
    description, names, content = (data + 2 * SEPARATOR).split(SEPARATOR, 2)
    with _directory({"model.safetensors": _safetensors(names, content)}) as path, _tgis_errors():
        with library_errors("cannot load it"):
            config = PreTrainedConfig(quantization_config=msgspec.json.decode(description))
            found = resolve_quantization(engine_options(path, 1), config, torch.float32, torch.device("cpu"))
            layers = found.checkpoint.layers if found and found.checkpoint else []
            weights = [layer.checked() for layer in layers]
        for layer, weight in zip(layers, weights, strict=True):
            assert weight.codes.dtype == torch.uint8
            assert not weight.codes.numel() or int(weight.codes.max()) < len(weight.table)
            assert weight.dequantized().shape == layer.shape


def _safetensors(names: bytes, content: bytes) -> bytes:
    """The file with the tensors of lines "NAME DTYPE SIZE...": a fuzzer cannot count bytes."""
    header, end = {}, 0
    for name, dtype, sizes in re.findall(rf"(\S+) ({'|'.join(_WIDTHS)})((?: [0-9]{{1,20}})*)", names.decode("latin-1")):
        shape = [int(size) for size in sizes.split()]
        start, end = end, end + math.prod(shape) * _WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    if end > _MAX_TENSORS:
        return b""
    encoded = msgspec.json.encode(header)
    return len(encoded).to_bytes(8, "little") + encoded + content[:end].ljust(end, b"1")


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (frames, requests, adapters, quantized)
}


@contextlib.contextmanager
def _tgis_errors() -> Iterator[None]:
    """Ends the block at an exception that the outside world is meant to see."""
    try:
        yield
    except TgisError as error:
        text = str(error)
        assert "\n" not in text, text
        assert len(text) < _MAX_ERROR, text


@contextlib.contextmanager
def _directory(contents: dict[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=_memory()) as name:
        for file, content in contents.items():
            Path(name, file).write_bytes(content)
        yield Path(name)


@functools.cache
def _memory() -> str | None:
    """Where files are not written to a disk, thousands of times a second."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
