"""Soft prompts: read from the layouts of TGIS and PEFT, checked, and converted for a model."""

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterProblem
from tgis.prompts.files import CONFIG, DECODER, ENCODER, PICKLE, SAFETENSORS, AdapterDirectory
from tgis.prompts.tensor_file import (
    TargetModel,
    allocated_bytes,
    check_tensor,
    convert_tensor,
    load_peft_tensors,
    load_tensors,
    read_config,
)

_PROMPT_EMBEDDINGS = "prompt_embeddings"
_PEFT_TYPES = ("PROMPT_TUNING", "P_TUNING")

Part = tuple[str, Any] | None  # the name of a file, and what it holds, which may be anything
Parts = tuple[Part, Part]  # parts of the decoder and of the encoder


@dataclass(frozen=True, slots=True, eq=False)
class SoftPrompt:
    """Embeddings [virtual tokens, hidden size] in the model's dtype and on its device."""

    version: int  # a digest of its files
    decoder: torch.Tensor | None  # prepended to the input of the decoder
    encoder: torch.Tensor | None = None  # prepended to the input of the encoder
    encoder_decoder: bool = False

    rank = 0  # no LoRA

    @property
    def decoder_length(self) -> int:
        """Virtual tokens prepended to the output of an encoder-decoder."""
        return len(self.decoder) if self.decoder is not None and self.encoder_decoder else 0

    @property
    def length(self) -> int:
        """Virtual tokens; as in TGIS, those prepended to an output count one more, for the start token."""
        start = int(self.decoder_length > 0)
        return start + sum(len(part) for part in (self.decoder, self.encoder) if part is not None)

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return allocated_bytes(part for part in (self.decoder, self.encoder) if part is not None)


class _PeftConfig(msgspec.Struct):
    """The fields of adapter_config.json that matter for soft prompts."""

    peft_type: str
    task_type: str | None = None
    num_virtual_tokens: int | None = None
    num_transformer_submodules: int | None = None

    @property
    def encoder_decoder(self) -> bool:
        return self.task_type == "SEQ_2_SEQ_LM"

    @property
    def num_rows(self) -> int | None:
        """Expected rows of the tensor, None if not stated."""
        parts = self.num_transformer_submodules or (2 if self.encoder_decoder else 1)
        return None if self.num_virtual_tokens is None else parts * self.num_virtual_tokens


def read_soft_prompt(directory: AdapterDirectory, limit: int, target: TargetModel) -> SoftPrompt:
    """The soft prompt of a directory for the model, from files of at most `limit` bytes; AdapterError if unusable.

    PEFT's layout takes precedence over TGIS's.
    """
    is_peft = any(directory.has(name) for name in (CONFIG, SAFETENSORS, PICKLE))
    decoder, encoder = (_read_peft if is_peft else _read_tgis)(directory, limit)
    if target.embedding_size == 0:
        raise AdapterError("it is a soft prompt, which this model does not take")
    if target.encoder_decoder is False:
        if decoder is None:
            raise AdapterError("it is for encoder-decoder models, this one is decoder-only")
        return SoftPrompt(directory.version, _fit_tensor(*decoder, target))
    if target.encoder_decoder and is_peft and encoder is None:
        raise AdapterError(f"{CONFIG} must say task_type SEQ_2_SEQ_LM, for this is an encoder-decoder model")
    before_output, before_input = (_fit_tensor(*part, target) if part else None for part in (decoder, encoder))
    return SoftPrompt(directory.version, before_output, before_input, target.encoder_decoder is True)


def _read_tgis(directory: AdapterDirectory, limit: int) -> Parts:
    decoder, encoder = (
        (name, load_tensors(directory, name, limit)) if directory.has(name) else None for name in (DECODER, ENCODER)
    )
    if decoder is None and encoder is None:
        raise AdapterError(f"invalid adapter: no {CONFIG} found", AdapterProblem.NOT_FOUND)
    return decoder, encoder


def _read_peft(directory: AdapterDirectory, limit: int) -> Parts:
    config = read_config(directory, _PeftConfig) if directory.has(CONFIG) else None
    if config is not None and config.peft_type not in _PEFT_TYPES:
        raise AdapterError(config.peft_type[:40], AdapterProblem.UNSUPPORTED)
    name, content = load_peft_tensors(directory, limit)
    if not isinstance(content, dict) or _PROMPT_EMBEDDINGS not in content:
        raise AdapterError(f"{name} holds no {_PROMPT_EMBEDDINGS}")
    part = name, content[_PROMPT_EMBEDDINGS]
    if config is None:
        return part, None
    tensor = check_tensor(*part)
    if config.num_rows != len(tensor) and (config.encoder_decoder or config.num_rows is not None):
        raise AdapterError(f"{name} has {len(tensor)} virtual tokens, {CONFIG} says {config.num_rows}")
    if config.encoder_decoder:  # PEFT itself ignores the other rows
        return None, (name, tensor[: config.num_virtual_tokens])
    return part, None


def _fit_tensor(name: str, content: Any, target: TargetModel) -> torch.Tensor:
    """A copy of the tensor for the model; AdapterError if it does not fit."""
    tensor = check_tensor(name, content)
    rows, width = tensor.shape
    if not 1 <= rows <= target.max_length:
        raise AdapterError(f"{name} has {rows} virtual tokens, from 1 to {target.max_length} are allowed")
    if target.encoder_decoder and rows % 2 and name in (DECODER, ENCODER):
        raise AdapterError(f"{name} has {rows} virtual tokens, it must be an even number")
    if target.embedding_size not in (None, width):
        raise AdapterError(f"{name} has rows of {width} numbers, the model's embeddings have {target.embedding_size}")
    return convert_tensor(name, tensor, target)
