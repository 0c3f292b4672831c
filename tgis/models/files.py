"""Finds a model's files and reads its JSON configuration, without importing torch.

MODEL_NAME is a directory or a name in the hub cache; nothing is downloaded. The files are not trusted: anything
missing, broken or of the wrong type is a StartError that names the path.
"""

import contextlib
import json
import math
import os
import re
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tgis.errors import StartError, file_errors
from tgis.models.gguf import WEIGHTS

MAX_JSON_BYTES = 1 << 28  # the largest tokenizers known have about 1 << 25
MAX_INT = 2**31 - 1  # limit of token ids and lengths
CONFIG_EXTENSIONS = (".json", ".py", ".model", ".md", ".txt", ".spm")  # extensions of config and tokenizer files
DEFAULT_SEQUENCE_LENGTH = 2048
SEQUENCE_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# By the name in config.json: modules of layers and experts, tables of positions are made before any weight is read.
_MAX_COUNTS = {
    r"\w{0,40}(layers?|experts)": 10_000,
    r"\w{0,40}heads?": 1024,
    "|".join(SEQUENCE_LENGTH_KEYS): 1 << 24,
}

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")  # one file, or the index of several
EMBEDDING_SIZE_KEYS = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's directory and its parsed JSON files; `generation_config` is empty if the file is missing."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]


def find_model(name: str, revision: str | None, cache_dir: str | None) -> ModelFiles:
    """The model in directory `name`, else the one with that name and revision in the hub cache `cache_dir`.

    The revision is ignored for a directory. StartError if there is no such model or its JSON is broken.
    """
    with file_errors(f"cannot read model {name!r}"):
        path = find_directory(name, revision, cache_dir)
        config = read_json(path / "config.json")
        _check_counts(config, path / "config.json")
        return ModelFiles(path, config, read_if_any(path / "generation_config.json"))


def _check_counts(config: dict[str, Any], path: Path) -> None:
    """StartError for more layers, experts, heads or positions than any model has, in any section."""
    sections = [config]
    for section in sections:
        sections += [value for value in section.values() if isinstance(value, dict)]
        for key, value in section.items():
            most = next((most for pattern, most in _MAX_COUNTS.items() if re.fullmatch(pattern, key)), math.inf)
            if (_as_int(value) or 0) > most:
                raise StartError(f"{path}: {key} is {reprlib.repr(value)}, at most {most} are allowed")


def find_weights(path: Path) -> tuple[Path, ...]:
    """The safetensors files in a model's directory, sorted, or the GGUF file; StartError if any is missing."""
    single, index = (path / name for name in SAFETENSORS)
    if single.is_file():
        shards = [single]
    elif index.is_file():
        shards = shard_files(index)
    elif (gguf := path / WEIGHTS).is_file():
        return (gguf,)
    else:
        hint = ": tgis convert-to-safetensors makes them of its .bin files" if any(path.glob("*.bin")) else ""
        raise StartError(f"{path} has no safetensors weights (model.safetensors or {index.name}){hint}")
    for shard in shards:
        _check_safetensors(shard)
    return tuple(shards)


def shard_files(index: Path) -> list[Path]:
    """The files listed in the index of a sharded model, sorted; StartError if any is missing."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise StartError(f"{index} has no weight_map")
    for name in names.values():
        if not isinstance(name, str) or not name.isprintable() or Path(name).name != name:
            raise StartError(f"{index} names {reprlib.repr(name)}, which is no file name")
        if not os.path.isfile(index.parent / name):  # also for names that no file can have
            raise StartError(f"{index} names {name:.80}, which is missing")
    return [index.parent / name for name in sorted(set(names.values()))]


def max_sequence_length(config: dict[str, Any]) -> int:
    """The context length of the model: the value of the first known key, else 2048."""
    lengths = _ints(config, *SEQUENCE_LENGTH_KEYS)
    return next((min(length, MAX_INT) for length in lengths if length >= 0), DEFAULT_SEQUENCE_LENGTH)


def is_encoder_decoder(config: dict[str, Any]) -> bool:
    """Whether the model is an encoder-decoder."""
    value = config.get("is_encoder_decoder", False)
    if not isinstance(value, bool):
        raise StartError(f"config.json: is_encoder_decoder must be true or false, not {reprlib.repr(value)}")
    return value


def eos_token_ids(model: ModelFiles) -> tuple[int, ...]:
    """EOS ids from config.json, then from generation_config.json; may be empty."""
    named = model.config.get("eos_token_id")
    if named is None:
        named = _text_config(model.config).get("eos_token_id")
    ids = _as_ids(named, "config.json")
    ids += _as_ids(model.generation_config.get("eos_token_id"), "generation_config.json")
    return tuple(dict.fromkeys(ids))


def embedding_size(config: dict[str, Any]) -> int | None:
    """Size of the token embeddings, if config.json states it."""
    return next(_ints(config, *EMBEDDING_SIZE_KEYS), None)


def pad_token_id(config: dict[str, Any]) -> int | None:
    """The id of the padding token, if config.json states it."""
    return next(_ints(config, "pad_token_id"), None)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of limited size."""
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise StartError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartError(f"{path} does not hold a JSON object")
    return value


def read_if_any(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty without the file."""
    return read_json(path) if path.is_file() else {}


def read_text(path: Path) -> str:
    """The UTF-8 text in a file of limited size."""
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise StartError(f"{path} is not UTF-8: {error.reason}") from error


def _read(path: Path) -> bytes:
    with file_errors(f"cannot read {path}"), path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise StartError(f"{path} has more than {MAX_JSON_BYTES} bytes")
    return data


def find_directory(name: str, revision: str | None, cache_dir: str | None, config: str = "config.json") -> Path:
    """The directory `name`, else that of this name and revision in the hub cache; `config` must exist there."""
    if not name or not name.isprintable():
        raise StartError(f"{name!r} is not a valid model name")
    if (Path(name) / config).exists():
        return Path(name)
    path = _cached_snapshot(name, revision, cache_dir) if cache_dir else None
    if path is None and not Path(name).is_dir():
        missing = f"no such directory, and no revision {revision or 'main'!r:.100} of it in the cache {cache_dir}"
        raise StartError(f"model {name!r} not found: {missing} (see tgis download-weights)")
    if path is None or not (path / config).exists():
        raise StartError(f"{path or name} has no {config}")
    return path


def _cached_snapshot(name: str, revision: str | None, cache_dir: str) -> Path | None:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - not needed for directories
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    with contextlib.suppress(ValueError, LocalEntryNotFoundError):
        # Any pattern would demand that all files are there that match it
        cached = snapshot_download(
            name, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=[]
        )
        return Path(cached)
    return None


class _Tensor(msgspec.Struct):
    """What a header says of a tensor, or of the whole file; offsets count from the end of the header."""

    data_offsets: tuple[int, int] = (0, 0)


def _check_safetensors(shard: Path) -> None:
    """StartError if the file is something else, such as a git-lfs pointer, or truncated.

    The package safetensors would import numpy, 9 MB in a process that does without.
    """
    with open(shard, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = file.read(min(header_size, MAX_JSON_BYTES))
    problem = "its header is not JSON"
    with contextlib.suppress(msgspec.DecodeError):
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor]).values()
        size = 8 + header_size + max((tensor.data_offsets[1] for tensor in tensors), default=0)
        problem = "" if size == shard.stat().st_size else f"it should have {size} bytes"
    if problem:
        raise StartError(f"{shard} is not a safetensors file, perhaps a git-lfs pointer or half a download: {problem}")


def tokenizer_settings(directory: Path) -> dict[str, Any]:
    """What stands beside tokenizer.json. special_tokens_map.json comes first where older versions have written it."""
    settings = read_if_any(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    return settings | read_if_any(directory / "special_tokens_map.json")


def special_tokens(directory: Path) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and so on in a tokenizer's settings."""
    values = {key: value for key, value in tokenizer_settings(directory).items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in values.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text part of a multimodal model's config."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}


def _ints(config: dict[str, Any], *keys: str) -> Iterator[int]:
    """The integers under these keys, of the whole config before those of its text part."""
    values = (_as_int(section.get(key)) for section in (config, _text_config(config)) for key in keys)
    return (value for value in values if value is not None)


def _as_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_ids(value: object, file: str) -> list[int]:
    ids = [_as_int(entry) for entry in value] if isinstance(value, list) else [_as_int(value)]
    if value is not None and any(entry is None or entry > MAX_INT for entry in ids):
        text = f"must be an integer or a list of them, at most {MAX_INT}, not {reprlib.repr(value)}"
        raise StartError(f"{file}: eos_token_id {text}")
    return [entry for entry in ids if entry is not None and entry >= 0]  # some configs have -1 for none
