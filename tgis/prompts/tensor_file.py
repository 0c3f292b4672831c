"""Files of tensors, untrusted: read within limits, checked, and converted to the type and device of a model."""

import io
import threading
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any, TypeVar

import msgspec
import safetensors.torch
import torch

from tgis.errors import AdapterError
from tgis.prompts.files import CONFIG, PICKLE, SAFETENSORS, AdapterDirectory

_SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_CONFIG_BYTES = 1 << 20
_ALLOCATION_BYTES = 512  # granularity of torch's allocator

T = TypeVar("T")

# Held while a thread other than the engine's waits for a CUDA device, and while the engine's forbids it: torch can only
# forbid waiting to all threads of a process.
may_wait = threading.Lock()


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that adapters must fit; None for unknown properties."""

    embedding_size: int | None  # 0: the model takes no soft prompts
    max_length: int  # virtual tokens of a soft prompt
    dtype: torch.dtype
    device: torch.device
    encoder_decoder: bool | None = False
    lora_targets: Mapping[str, tuple[int, int]] | None = None  # name -> in and out features; empty: takes no LoRA


def read_config(directory: AdapterDirectory, kind: type[T]) -> T:
    """adapter_config.json, decoded as `kind`."""
    data = directory.read(CONFIG, _MAX_CONFIG_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not valid: {error}") from error


def load_peft_tensors(directory: AdapterDirectory, limit: int) -> tuple[str, Any]:
    """The name of PEFT's tensor file, safetensors or pickle, and its content."""
    name = SAFETENSORS if directory.has(SAFETENSORS) else PICKLE
    if not directory.has(name):
        raise AdapterError(f"neither {SAFETENSORS} nor {PICKLE} is there")
    return name, load_tensors(directory, name, limit)


def load_tensors(directory: AdapterDirectory, name: str, limit: int) -> Any:
    """Load a file of at most `limit` bytes: a tensor or a dict of tensors if all is well, but unchecked."""
    data = directory.read(name, limit)
    try:
        if name == SAFETENSORS:
            return safetensors.torch.load(data)
        content = _load_pickle(name, data, limit)
        return dict(content) if isinstance(content, dict) else content
    except AdapterError:
        raise
    except UnpicklingError as error:
        raise AdapterError(f"{name} is broken, or holds something other than tensors") from error
    except Exception as error:  # on hostile bytes the libraries raise anything
        raise AdapterError(f"{name} is damaged, or not of this format") from error


def _load_pickle(name: str, data: bytes, limit: int) -> Any:
    """Load a file of torch.save, in which only tensors and plain containers are allowed."""
    file = io.BytesIO(data)
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > limit:
            raise AdapterError(f"{name} unpacks to {size} bytes, at most {limit} are allowed")
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def check_tensor(name: str, tensor: Any) -> torch.Tensor:
    """Return a dense matrix of floats without its gradient; AdapterError for anything else."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise AdapterError(f"{name} holds a {type(tensor).__name__}, not a tensor")
    if tensor.dim() != 2:
        raise AdapterError(f"{name} holds a tensor of {tensor.dim()} dimensions, not 2")
    if tensor.dtype not in _SUPPORTED_DTYPES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
        raise AdapterError(f"{name} holds a tensor that is no dense one of floats ({kind})")
    if tensor.nbytes > tensor.untyped_storage().nbytes():  # an expanded view, which may claim any size
        raise AdapterError(f"{name} holds a tensor that is larger than what is stored of it")
    return tensor.detach()


def convert_tensor(name: str, tensor: torch.Tensor, target: TargetModel, scale: float = 1.0) -> torch.Tensor:
    """A copy of the tensor times `scale` in the model's dtype and on its device; AdapterError unless all is finite."""
    if not tensor.isfinite().all():
        raise AdapterError(f"{name} has numbers that are not finite")
    result = torch.empty(tensor.shape, dtype=target.dtype).copy_(tensor.double() * scale)
    if not result.isfinite().all():
        text = f"{name} has numbers that are not finite when converted from {tensor.dtype} to {result.dtype}"
        raise AdapterError(text)
    if target.device.type != "cuda":
        return result.to(target.device)
    with may_wait:
        moved = result.to(target.device)
        torch.cuda.current_stream(target.device).synchronize()  # the engine's steps run on another stream
    return moved


def allocated_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory that the tensors take, as torch allocates it."""
    return sum(-(-tensor.nbytes // _ALLOCATION_BYTES) * _ALLOCATION_BYTES for tensor in tensors)
