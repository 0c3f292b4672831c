"""Soft prompts as tensors: what the files of TGIS's and PEFT's layout hold, checked, and made to fit a model.

What is true of any file of tensors is here too; LoRA adapters are next door.
"""

import io
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import safetensors.torch
import torch

from tgis.errors import AdapterError
from tgis.ipc.adapters import AdapterProblem
from tgis.prompts.files import CONFIG, DECODER, ENCODER, PICKLE, SAFETENSORS, AdapterDirectory

_PROMPT_EMBEDDINGS = "prompt_embeddings"
_PEFT_TYPES = ("PROMPT_TUNING", "P_TUNING")
_SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_CONFIG_BYTES = 1 << 20
_ALLOCATION_BYTES = 512  # bytes that torch allocates at a time

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor as it was read, and the file that holds it."""

    file: str
    tensor: torch.Tensor  # [virtual tokens, width], though that is still to be checked


@dataclass(frozen=True, slots=True)
class RawSoftPrompt:
    """What a directory holds, as it is."""

    layout: str
    decoder: FileTensor | None
    encoder: FileTensor | None
    peft: bool = False


@dataclass(frozen=True, slots=True)
class TargetModel:
    """What prompts must fit; None for what is not known."""

    embedding_size: int | None  # of the model's embeddings
    max_length: int  # virtual tokens of one tensor
    dtype: torch.dtype
    device: torch.device
    encoder_decoder: bool | None = False
    lora_targets: Mapping[str, tuple[int, int]] | None = (
        None  # inputs and outputs of layers that can be adapted, by name
    )


@dataclass(frozen=True, slots=True, eq=False)
class SoftPrompt:
    """A prompt that an engine can use: embeddings [virtual tokens, width] of the model's type, on its device."""

    version: int  # unlike that of any other
    decoder: torch.Tensor | None  # before all that a decoder sees
    encoder: torch.Tensor | None = None  # before the input of an encoder-decoder
    encoder_decoder: bool = False

    @property
    def decoder_length(self) -> int:
        """Virtual tokens before the output of an encoder-decoder."""
        return len(self.decoder) if self.decoder is not None and self.encoder_decoder else 0

    @property
    def length(self) -> int:
        """Virtual tokens, and as TGIS counts, the start token behind those before an output."""
        start = int(self.decoder_length > 0)
        return start + sum(len(part) for part in (self.decoder, self.encoder) if part is not None)

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return allocated_bytes(part for part in (self.decoder, self.encoder) if part is not None)


class _PeftConfig(msgspec.Struct):
    """What matters of adapter_config.json."""

    peft_type: str
    task_type: str | None = None
    num_virtual_tokens: int | None = None
    num_transformer_submodules: int | None = None

    @property
    def encoder_decoder(self) -> bool:
        """What sort of model it is for."""
        return self.task_type == "SEQ_2_SEQ_LM"

    @property
    def num_rows(self) -> int | None:
        """Of the tensor, if that is said."""
        parts = self.num_transformer_submodules or (2 if self.encoder_decoder else 1)
        return None if self.num_virtual_tokens is None else parts * self.num_virtual_tokens


def read_soft_prompt(directory: AdapterDirectory, limit: int) -> RawSoftPrompt:
    """The tensors of a directory, from files of at most `limit` bytes; what else is there decides the layout."""
    if any(directory.has(name) for name in (CONFIG, SAFETENSORS, PICKLE)):
        return _read_peft(directory, limit)
    decoder, encoder = (
        FileTensor(name, load_tensors(directory, name, limit)) if directory.has(name) else None
        for name in (DECODER, ENCODER)
    )
    if decoder is None and encoder is None:
        raise AdapterError(AdapterProblem.NOT_FOUND, f"invalid adapter: no {CONFIG} found")
    return RawSoftPrompt("TGIS", decoder, encoder)


def fit_soft_prompt(parts: RawSoftPrompt, target: TargetModel, version: int) -> SoftPrompt:
    """The prompt for the model; PromptError for what it cannot use."""
    decoder, encoder = parts.decoder, parts.encoder
    if target.embedding_size == 0:
        raise AdapterError(AdapterProblem.BROKEN, "it is a soft prompt, which this model does not take")
    if target.encoder_decoder is False:
        if decoder is None:
            raise AdapterError(AdapterProblem.BROKEN, "it is for encoder-decoder models, this one is decoder-only")
        return SoftPrompt(version, fit_tensor(decoder, target))
    if target.encoder_decoder and parts.peft and encoder is None:
        text = f"{CONFIG} must say task_type SEQ_2_SEQ_LM, for this is an encoder-decoder model"
        raise AdapterError(AdapterProblem.BROKEN, text)
    return SoftPrompt(
        version,
        decoder=fit_tensor(decoder, target) if decoder else None,
        encoder=fit_tensor(encoder, target) if encoder else None,
        encoder_decoder=target.encoder_decoder is True,
    )


def _read_peft(directory: AdapterDirectory, limit: int) -> RawSoftPrompt:
    config = read_config(directory, _PeftConfig) if directory.has(CONFIG) else None
    if config is not None and config.peft_type not in _PEFT_TYPES:
        raise AdapterError(AdapterProblem.UNSUPPORTED, config.peft_type[:40])
    name, content = load_peft_tensors(directory, limit)
    if not isinstance(content, dict) or _PROMPT_EMBEDDINGS not in content:
        raise AdapterError(AdapterProblem.BROKEN, f"{name} holds no {_PROMPT_EMBEDDINGS}")
    part = FileTensor(name, content[_PROMPT_EMBEDDINGS])
    if config is None:
        return RawSoftPrompt("PEFT", part, None, peft=True)
    tensor = check_tensor(part)
    if config.num_rows != len(tensor) and (config.encoder_decoder or config.num_rows is not None):
        text = f"{name} has {len(tensor)} virtual tokens, {CONFIG} says {config.num_rows}"
        raise AdapterError(AdapterProblem.BROKEN, text)
    if config.encoder_decoder:  # of what it trains, PEFT itself uses no more than this
        part = FileTensor(name, tensor[: config.num_virtual_tokens])
        return RawSoftPrompt(config.peft_type, None, part, peft=True)
    return RawSoftPrompt(config.peft_type, part, None, peft=True)


def read_config(directory: AdapterDirectory, kind: type[T]) -> T:
    """What adapter_config.json says, as far as `kind` wants to know."""
    data = directory.read(CONFIG, _MAX_CONFIG_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(AdapterProblem.BROKEN, f"{CONFIG} is not valid: {error}") from error


def load_peft_tensors(directory: AdapterDirectory, limit: int) -> tuple[str, Any]:
    """The name of PEFT's file, which may be of two formats, and what it holds."""
    name = SAFETENSORS if directory.has(SAFETENSORS) else PICKLE
    if not directory.has(name):
        raise AdapterError(AdapterProblem.BROKEN, f"neither {SAFETENSORS} nor {PICKLE} is there")
    return name, load_tensors(directory, name, limit)


def load_tensors(directory: AdapterDirectory, name: str, limit: int) -> Any:
    """What a file of at most `limit` bytes holds: one tensor, or several by name; with bad luck, anything."""
    data = directory.read(name, limit)
    try:
        if name == SAFETENSORS:
            return safetensors.torch.load(data)
        if (size := _uncompressed_size(data)) > limit:
            raise AdapterError(AdapterProblem.BROKEN, f"{name} unpacks to {size} bytes, at most {limit} are allowed")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except AdapterError:
        raise
    except pickle.UnpicklingError as error:
        raise AdapterError(AdapterProblem.BROKEN, f"{name} holds something other than tensors") from error
    except Exception as error:  # hostile bytes make the libraries raise whatever it may be
        raise AdapterError(AdapterProblem.BROKEN, f"{name} is damaged, or not of this format") from error


def _uncompressed_size(data: bytes) -> int:
    """Bytes in the archive that torch.save writes; before torch 1.6 it was none, and that is not read."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def check_tensor(part: FileTensor) -> torch.Tensor:
    """The tensor, if it is one of two dimensions."""
    tensor = part.tensor
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise AdapterError(AdapterProblem.BROKEN, f"{part.file} holds a {type(tensor).__name__}, not a tensor")
    if tensor.dim() != 2:
        raise AdapterError(AdapterProblem.BROKEN, f"{part.file} holds a tensor of {tensor.dim()} dimensions, not 2")
    if tensor.dtype not in _SUPPORTED_DTYPES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
        raise AdapterError(AdapterProblem.BROKEN, f"{part.file} holds a tensor that is no dense one of floats ({kind})")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # a view that repeats its numbers, without end perhaps
        raise AdapterError(
            AdapterProblem.BROKEN, f"{part.file} holds a tensor that is larger than what is stored of it"
        )
    return tensor.detach()


def fit_tensor(part: FileTensor, target: TargetModel) -> torch.Tensor:
    """The tensor as the model needs it, in memory of its own; PromptError if that cannot be."""
    name, tensor = part.file, check_tensor(part)
    rows, width = tensor.shape
    if not 1 <= rows <= target.max_length:
        text = f"{name} has {rows} virtual tokens, from 1 to {target.max_length} are allowed"
        raise AdapterError(AdapterProblem.BROKEN, text)
    if target.encoder_decoder and rows % 2 and part.file in (DECODER, ENCODER):
        raise AdapterError(AdapterProblem.BROKEN, f"{name} has {rows} virtual tokens, it must be an even number")
    if target.embedding_size not in (None, width):
        text = f"{name} has rows of {width} numbers, the model's embeddings have {target.embedding_size}"
        raise AdapterError(AdapterProblem.BROKEN, text)
    return convert_tensor(name, tensor, target)


def convert_tensor(name: str, tensor: torch.Tensor, target: TargetModel, scale: float = 1.0) -> torch.Tensor:
    """The tensor times `scale` in the model's type and on its device, in memory of its own, all of it finite."""
    if not tensor.isfinite().all():
        raise AdapterError(AdapterProblem.BROKEN, f"{name} has numbers that are not finite")
    result = torch.empty(tensor.shape, dtype=target.dtype).copy_(tensor.double() * scale)
    if not result.isfinite().all():
        text = f"{name} has numbers that are not finite when converted from {tensor.dtype} to {result.dtype}"
        raise AdapterError(AdapterProblem.BROKEN, text)
    moved = result.to(target.device)
    if target.device.type == "cuda":
        torch.cuda.current_stream(target.device).synchronize()  # steps run on another stream
    return moved


def allocated_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory, as torch allocates them."""
    return sum(-(-tensor.nbytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES for tensor in tensors)
