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

from tgis.errors import PromptError
from tgis.ipc.adapters import PromptProblem
from tgis.prompts.files import CONFIG, DECODER, ENCODER, PICKLED, SAFETENSORS, PromptDirectory

_KEY = "prompt_embeddings"
_PEFT_TYPES = ("PROMPT_TUNING", "P_TUNING")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_CONFIG_BYTES = 1 << 20
_ALLOCATION = 512  # bytes that torch allocates at a time

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor as it was read, and the file that holds it."""

    file: str
    tensor: torch.Tensor  # [virtual tokens, width], though that is still to be checked


@dataclass(frozen=True, slots=True)
class Parts:
    """What a directory holds, as it is."""

    layout: str
    decoder: Part | None
    encoder: Part | None
    peft: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """What prompts must fit; None for what is not known."""

    width: int | None  # of the model's embeddings
    max_length: int  # virtual tokens of one tensor
    dtype: torch.dtype
    device: torch.device
    encoder_decoder: bool | None = False
    linears: Mapping[str, tuple[int, int]] | None = None  # inputs and outputs of layers that can be adapted, by name


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
        return allocated(part for part in (self.decoder, self.encoder) if part is not None)


class _AdapterConfig(msgspec.Struct):
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
    def rows(self) -> int | None:
        """Of the tensor, if that is said."""
        parts = self.num_transformer_submodules or (2 if self.encoder_decoder else 1)
        return None if self.num_virtual_tokens is None else parts * self.num_virtual_tokens


def read_parts(directory: PromptDirectory, limit: int) -> Parts:
    """The tensors of a directory, from files of at most `limit` bytes; what else is there decides the layout."""
    if any(directory.has(name) for name in (CONFIG, SAFETENSORS, PICKLED)):
        return _read_peft(directory, limit)
    decoder, encoder = (
        Part(name, load(directory, name, limit)) if directory.has(name) else None for name in (DECODER, ENCODER)
    )
    if decoder is None and encoder is None:
        raise PromptError(PromptProblem.NOT_FOUND, f"invalid adapter: no {CONFIG} found")
    return Parts("TGIS", decoder, encoder)


def fit(parts: Parts, target: Target, version: int) -> SoftPrompt:
    """The prompt for the model; PromptError for what it cannot use."""
    decoder, encoder = parts.decoder, parts.encoder
    if target.width == 0:
        raise PromptError(PromptProblem.BROKEN, "it is a soft prompt, which this model does not take")
    if target.encoder_decoder is False:
        if decoder is None:
            raise PromptError(PromptProblem.BROKEN, "it is for encoder-decoder models, this one is decoder-only")
        return SoftPrompt(version, fitted(decoder, target))
    if target.encoder_decoder and parts.peft and encoder is None:
        text = f"{CONFIG} must say task_type SEQ_2_SEQ_LM, for this is an encoder-decoder model"
        raise PromptError(PromptProblem.BROKEN, text)
    return SoftPrompt(
        version,
        decoder=fitted(decoder, target) if decoder else None,
        encoder=fitted(encoder, target) if encoder else None,
        encoder_decoder=target.encoder_decoder is True,
    )


def _read_peft(directory: PromptDirectory, limit: int) -> Parts:
    config = read_config(directory, _AdapterConfig) if directory.has(CONFIG) else None
    if config is not None and config.peft_type not in _PEFT_TYPES:
        raise PromptError(PromptProblem.UNSUPPORTED, config.peft_type[:40])
    name, content = load_peft(directory, limit)
    if not isinstance(content, dict) or _KEY not in content:
        raise PromptError(PromptProblem.BROKEN, f"{name} holds no {_KEY}")
    part = Part(name, content[_KEY])
    if config is None:
        return Parts("PEFT", part, None, peft=True)
    tensor = checked(part)
    if config.rows != len(tensor) and (config.encoder_decoder or config.rows is not None):
        text = f"{name} has {len(tensor)} virtual tokens, {CONFIG} says {config.rows}"
        raise PromptError(PromptProblem.BROKEN, text)
    if config.encoder_decoder:  # of what it trains, PEFT itself uses no more than this
        part = Part(name, tensor[: config.num_virtual_tokens])
        return Parts(config.peft_type, None, part, peft=True)
    return Parts(config.peft_type, part, None, peft=True)


def read_config(directory: PromptDirectory, kind: type[T]) -> T:
    """What adapter_config.json says, as far as `kind` wants to know."""
    data = directory.read(CONFIG, _MAX_CONFIG_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(PromptProblem.BROKEN, f"{CONFIG} is not valid: {error}") from error


def load_peft(directory: PromptDirectory, limit: int) -> tuple[str, Any]:
    """The name of PEFT's file, which may be of two formats, and what it holds."""
    name = SAFETENSORS if directory.has(SAFETENSORS) else PICKLED
    if not directory.has(name):
        raise PromptError(PromptProblem.BROKEN, f"neither {SAFETENSORS} nor {PICKLED} is there")
    return name, load(directory, name, limit)


def load(directory: PromptDirectory, name: str, limit: int) -> Any:
    """What a file of at most `limit` bytes holds: one tensor, or several by name; with bad luck, anything."""
    data = directory.read(name, limit)
    try:
        if name == SAFETENSORS:
            return safetensors.torch.load(data)
        if (size := _unpacked_size(data)) > limit:
            raise PromptError(PromptProblem.BROKEN, f"{name} unpacks to {size} bytes, at most {limit} are allowed")
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except PromptError:
        raise
    except pickle.UnpicklingError as error:
        raise PromptError(PromptProblem.BROKEN, f"{name} holds something other than tensors") from error
    except Exception as error:  # hostile bytes make the libraries raise whatever it may be
        raise PromptError(PromptProblem.BROKEN, f"{name} is damaged, or not of this format") from error


def _unpacked_size(data: bytes) -> int:
    """Bytes in the archive that torch.save writes; before torch 1.6 it was none, and that is not read."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return sum(entry.file_size for entry in archive.infolist())


def checked(part: Part) -> torch.Tensor:
    """The tensor, if it is one of two dimensions."""
    tensor = part.tensor
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise PromptError(PromptProblem.BROKEN, f"{part.file} holds a {type(tensor).__name__}, not a tensor")
    if tensor.dim() != 2:
        raise PromptError(PromptProblem.BROKEN, f"{part.file} holds a tensor of {tensor.dim()} dimensions, not 2")
    if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
        raise PromptError(PromptProblem.BROKEN, f"{part.file} holds a tensor that is no dense one of floats ({kind})")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # a view that repeats its numbers, without end perhaps
        raise PromptError(PromptProblem.BROKEN, f"{part.file} holds a tensor that is larger than what is stored of it")
    return tensor.detach()


def fitted(part: Part, target: Target) -> torch.Tensor:
    """The tensor as the model needs it, in memory of its own; PromptError if that cannot be."""
    name, tensor = part.file, checked(part)
    rows, width = tensor.shape
    if not 1 <= rows <= target.max_length:
        text = f"{name} has {rows} virtual tokens, from 1 to {target.max_length} are allowed"
        raise PromptError(PromptProblem.BROKEN, text)
    if target.encoder_decoder and rows % 2 and part.file in (DECODER, ENCODER):
        raise PromptError(PromptProblem.BROKEN, f"{name} has {rows} virtual tokens, it must be an even number")
    if target.width not in (None, width):
        text = f"{name} has rows of {width} numbers, the model's embeddings have {target.width}"
        raise PromptError(PromptProblem.BROKEN, text)
    return converted(name, tensor, target)


def converted(name: str, tensor: torch.Tensor, target: Target, scale: float = 1.0) -> torch.Tensor:
    """The tensor times `scale` in the model's type and on its device, in memory of its own, all of it finite."""
    if not tensor.isfinite().all():
        raise PromptError(PromptProblem.BROKEN, f"{name} has numbers that are not finite")
    result = torch.empty(tensor.shape, dtype=target.dtype).copy_(tensor.double() * scale)
    if not result.isfinite().all():
        text = f"{name} has numbers that are not finite when converted from {tensor.dtype} to {result.dtype}"
        raise PromptError(PromptProblem.BROKEN, text)
    moved = result.to(target.device)
    if target.device.type == "cuda":
        torch.cuda.current_stream(target.device).synchronize()  # steps run on another stream
    return moved


def allocated(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory, as torch allocates them."""
    return sum(-(-tensor.nbytes // _ALLOCATION) * _ALLOCATION for tensor in tensors)
