"""Files of soft prompts, valid and broken, as bytes."""

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

WIDTH, MOST, CAPACITY = 16, 8, 64 << 10  # hidden size of the model, virtual tokens, bytes of a file
KEY = "prompt_embeddings"
DECODER, ENCODER = "decoder.pt", "encoder.pt"
CONFIG, SAFETENSORS, BIN = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
EXECUTED = "tgis-test-executed"  # a directory that hostile code would create

Files = dict[str, bytes]


def matrix(rows: int = 4, width: int = WIDTH, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, width), generator=torch.Generator().manual_seed(seed))


def write(directory: Path, files: Files) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)


def pt(value: Any, old_format: bool = False) -> bytes:
    """Bytes of torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not old_format)
    return buffer.getvalue()


def tgis(decoder: Any) -> Files:
    return {DECODER: pt(decoder)}


def config(**values: Any) -> bytes:
    return json.dumps({"peft_type": "PROMPT_TUNING"} | values).encode()


def peft(tensors: dict[str, torch.Tensor], **values: Any) -> Files:
    return {CONFIG: config(**values), SAFETENSORS: safetensors.torch.save(tensors)}


def peft_config(data: bytes) -> Files:
    """Valid, except perhaps for the config."""
    return peft({KEY: matrix()}) | {CONFIG: data}


def rezipped(file: bytes, compression: int = zipfile.ZIP_STORED, **changes: bytes) -> bytes:
    """The archive of torch.save with the content of some files, by prefix, replaced and new files added."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        content = {entry: archive.read(entry) for entry in archive.namelist()}
    folder = next(iter(content)).partition("/")[0]
    content |= {f"{folder}/{name}.pkl": changed for name, changed in changes.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def described(pickled: bytes) -> bytes:
    """The archive of torch.save whose tensors are described by this pickle instead."""
    return rezipped(pt(matrix()), data=b"\x80\x02" + pickled + b".")


ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def rebuilt(numel: int, rows: int, width: int, stride: int) -> bytes:
    """A file with the 64 numbers of `matrix()`, as a tensor that its pickle claims."""
    return described(rebuilt_tensor(numel, rows, width, stride))


def rebuilt_tensor(numel: int, rows: int, width: int, stride: int) -> bytes:
    """The part of a pickle that makes a tensor of the storage 0."""
    storage = b"X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + _long(numel) + b"tQ"
    arguments = b"((" + storage + _long(0) + _long(rows) + _long(width) + b"\x86" + _long(stride) + _long(1) + b"\x86"
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"\x89" + ORDERED_DICT + b"tR"


def _long(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


class Evil:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (EXECUTED,)


def endless(rows: int, width: int) -> torch.Tensor:
    """A large tensor that takes no space in the file."""
    return torch.zeros(1).expand(rows, width)


NO_TENSOR_FILE = "is damaged, or not of this format"
OTHER_THINGS = "decoder.pt is broken, or holds something other than tensors"
NOT_DENSE = "decoder.pt holds a tensor that is no dense one of floats"
BROKEN: dict[str, tuple[Files, str]] = {  # files, and the error message
    "empty": ({DECODER: b""}, NO_TENSOR_FILE),
    "garbage": ({DECODER: b"no tensor " * 50}, OTHER_THINGS),
    "a bare pickle": ({DECODER: pickle.dumps([1.0])}, NO_TENSOR_FILE),
    "cut short": ({DECODER: pt(matrix())[:700]}, NO_TENSOR_FILE),
    "no tensor's file": ({DECODER: rezipped(pt(matrix()), data=b"\x80\x02.")}, "decoder.pt"),
    "code": (
        {DECODER: rezipped(pt(matrix()), data=pickle.dumps(Evil(), protocol=2))},
        OTHER_THINGS,
    ),
    "more than the file has": ({DECODER: rebuilt(1 << 20, 1 << 10, 1 << 10, 1 << 10)}, NO_TENSOR_FILE),
    "beyond the end": ({DECODER: rebuilt(64, 5, 16, 16)}, NO_TENSOR_FILE),
    "backwards": ({DECODER: rebuilt(64, 4, 16, -16)}, NO_TENSOR_FILE),
    "an overflow": ({DECODER: rebuilt(64, 1 << 62, 1 << 62, 0)}, NO_TENSOR_FILE),
    "half an overflow": ({DECODER: rebuilt(64, 1 << 31, 1 << 31, 0)}, NO_TENSOR_FILE),
    "methods replaced": (
        {BIN: described(ORDERED_DICT + b"}X\x05\0\0\0itemsNsb")},
        "adapter_model.bin holds no prompt_embeddings",
    ),
    "a bomb": (
        {DECODER: rezipped(pt(matrix()), zipfile.ZIP_DEFLATED, bomb=bytes(CAPACITY))},
        f"bytes, at most {CAPACITY} are allowed",
    ),
    "too large": (
        {DECODER: bytes(CAPACITY + 1)},
        f"decoder.pt has {CAPACITY + 1} bytes, at most {CAPACITY} are allowed",
    ),
    "a dict": (tgis({KEY: matrix()}), "decoder.pt holds a dict, not a tensor"),
    "a list": (tgis([matrix()]), "decoder.pt holds a list, not a tensor"),
    "a vector": (tgis(matrix()[0]), "decoder.pt holds a tensor of 1 dimensions, not 2"),
    "a cube": (tgis(matrix()[None]), "decoder.pt holds a tensor of 3 dimensions, not 2"),
    "integers": (tgis(matrix().long()), f"{NOT_DENSE} (torch.int64, torch.strided, cpu)"),
    "sparse": (tgis(matrix().to_sparse()), f"{NOT_DENSE} (torch.float32, torch.sparse_coo, cpu)"),
    "without content": (tgis(matrix().to("meta")), f"{NOT_DENSE} (torch.float32, torch.strided, meta)"),
    "no rows": (tgis(matrix(0)), f"decoder.pt has 0 virtual tokens, from 1 to {MOST} are allowed"),
    "many rows": (tgis(matrix(9)), f"decoder.pt has 9 virtual tokens, from 1 to {MOST} are allowed"),
    "endless rows": (tgis(endless(1 << 40, WIDTH)), "decoder.pt holds a tensor that is larger than what is stored"),
    "width": (tgis(matrix(4, 64)), f"decoder.pt has rows of 64 numbers, the model's embeddings have {WIDTH}"),
    "endless width": (tgis(endless(4, 1 << 40)), "decoder.pt holds a tensor that is larger than what is stored of it"),
    "NaN": (tgis(matrix().fill_diagonal_(torch.nan)), "decoder.pt has numbers that are not finite"),
    "infinite": (tgis(matrix().fill_diagonal_(torch.inf)), "decoder.pt has numbers that are not finite"),
    "too large for the type": (
        tgis(matrix().double() * 1e300),
        "decoder.pt has numbers that are not finite when converted from torch.float64 to torch.float32",
    ),
    "an encoder's alone": ({ENCODER: pt(matrix())}, "it is for encoder-decoder models, this one is decoder-only"),
    "a config alone": ({CONFIG: config()}, "neither adapter_model.safetensors nor adapter_model.bin is there"),
    "a large config": (peft_config(bytes((1 << 20) + 1)), "adapter_config.json has 1048577 bytes, at most 1048576 are"),
    "a config cut short": (peft_config(b'{"peft_type": "'), "adapter_config.json is not valid: "),
    "a config not in UTF-8": (peft_config(b'{"peft_type": "\xff"}'), "adapter_config.json is not valid: "),
    "a config too deep": (peft_config(b'{"x":' + b"[" * 100_000), "adapter_config.json is not valid: "),
    "a config that is a list": (peft_config(b"[]"), "adapter_config.json is not valid: Expected `object`, got `array`"),
    "a config without a type": (
        peft_config(b"{}"),
        "adapter_config.json is not valid: Object missing required field `peft_type`",
    ),
    "a config with a list of types": (peft_config(config(peft_type=["LORA"])), "adapter_config.json is not valid: "),
    "a config of another length": (
        peft({KEY: matrix()}, num_virtual_tokens=5),
        "adapter_model.safetensors has 4 virtual tokens, adapter_config.json says 5",
    ),
    "a config of an encoder-decoder": (
        peft({KEY: matrix()}, num_virtual_tokens=2, task_type="SEQ_2_SEQ_LM"),
        "it is for encoder-decoder models, this one is decoder-only",
    ),
    "other tensors": (peft({"lora_A": matrix()}), "adapter_model.safetensors holds no prompt_embeddings"),
    "no safetensors": (
        {CONFIG: config(), SAFETENSORS: struct.pack("<Q", 1 << 60) + b"{}"},
        "adapter_model.safetensors is damaged, or not of this format",
    ),
    "a bin with a tensor": ({BIN: pt(matrix())}, "adapter_model.bin holds no prompt_embeddings"),
    "a bin with text for a tensor": ({BIN: pt({KEY: "text"})}, "adapter_model.bin holds a str, not a tensor"),
}
