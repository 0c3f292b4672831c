"""Makes a directory that transformers can read for a GGUF file: its configuration and tokenizer come from files next to
it, else from its header.

A child process runs this file: `python -m tgis.models.convert.gguf DIRECTORY`. The file is not trusted: the package
gguf, which can be made to use any time and memory, reads it only there, within limits.
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec

from tgis import __version__
from tgis.errors import StartError, file_errors, library_errors
from tgis.models import staging
from tgis.models.convert.weights import needs_conversion
from tgis.models.files import ModelFiles, eos_token_ids, find_directory, read_json
from tgis.models.gguf import BLOCKS, HEADER, WEIGHTS, GgufHeader, GgufTensor

CONFIG = "config.json"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_COMPANIONS = frozenset({
    CONFIG, "generation_config.json", *_VOCABULARIES, "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates",
})  # fmt: skip
CONVERT_SECONDS = 600
_MAX_MEMORY_BYTES = 8 << 30
# Architectures whose llama.cpp metadata transformers knows completely.
_DESCRIBED = frozenset({"llama", "qwen2", "qwen3"})
_FREQUENCIES = "rope_freqs.weight"  # divisors of the frequencies of rotary embeddings, as in Llama 3.1


def ensure_directory(name: str, cache_dir: Path, revision: str | None = None, hub_cache: str | None = None) -> str:
    """MODEL_NAME, unless that is a GGUF file or a directory with one and no other weights, which may be in the hub
    cache: then the name of a directory below `cache_dir`/gguf, made once.
    """
    file = find_gguf(name, revision, hub_cache)
    if file is None:
        return name
    if importlib.util.find_spec("gguf") is None:
        raise StartError(f"{file} needs the package gguf: pip install 'tgis[gguf]'")
    with file_errors(f"cannot keep the configuration and tokenizer of {file}"):
        companions = [path for path in file.parent.iterdir() if path.name in _COMPANIONS]
        key = staging.files_key([file, *companions], __version__, importlib.metadata.version("transformers"))
        return str(staging.made_once(cache_dir / "gguf" / key, functools.partial(_make, file, companions)))


def find_gguf(name: str, revision: str | None = None, hub_cache: str | None = None) -> Path | None:
    """The file of this name, or in the directory of this name, which may be in the hub cache."""
    if name.endswith(".gguf") and os.path.isfile(name):
        return Path(name)
    try:
        path = find_directory(name, revision, hub_cache, ".")
    except (StartError, OSError):  # reported where the model is looked up again
        return None
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")) or needs_conversion(path):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise StartError(f"{path} has {len(files)} GGUF files, MODEL_NAME must name one of them: {names:.500}")
    return files[0]


def _make(file: Path, companions: list[Path], out: Path) -> None:
    for path in companions:
        (out / path.name).symlink_to(path.resolve())
    (out / WEIGHTS).symlink_to(file.resolve())
    command = [sys.executable, "-m", "tgis.models.convert.gguf", str(out)]
    if reason := staging.run_child(command, CONVERT_SECONDS):
        raise StartError(f"{file}: {reason}")


def convert_here(out: Path) -> None:
    """Write the header, and what no file next to the GGUF file says; the parent reports exceptions."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers
    from tgis.models.convert.gguf_tokenizer import end_ids, make_tokenizer, tokenizer_fields  # noqa: PLC0415 - slow

    metadata, header = read_file(out / WEIGHTS)
    (out / HEADER).write_bytes(msgspec.json.encode(header))
    config = out / CONFIG
    content = read_json(config) if config.is_file() else _config(metadata, header, out)
    if not any((out / name).is_file() for name in _VOCABULARIES):
        make_tokenizer(metadata, out)
    with library_errors("the tokens that end a text cannot be read"):
        content["eos_token_id"] = [*eos_token_ids(ModelFiles(out, content, {})), *end_ids(tokenizer_fields(metadata))]
    config.unlink(missing_ok=True)  # it may be a link
    config.write_text(json.dumps(content | {"quantization_config": {"quant_method": "gguf"}}))


def read_file(file: Path) -> tuple[dict[str, Any], GgufHeader]:
    """Read the metadata and the tensors' places; StartError if the file is broken or not supported."""
    from gguf import GGUFReader  # noqa: PLC0415 - an extra

    with library_errors("it is not a GGUF file that can be read"):
        reader = GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture, parts = metadata.get("general.architecture"), metadata.get("split.count", 0)
    if not isinstance(architecture, str) or parts not in (0, 1) or reader.byte_order != "I":
        what = f"general.architecture {architecture!r:.40}, split.count {parts!r:.40}, byte order {reader.byte_order}"
        raise StartError(f"it has {what}: only complete little-endian files are supported")
    return metadata, GgufHeader(architecture, {tensor.name: _tensor(tensor) for tensor in reader.tensors})


def _tensor(tensor: Any) -> GgufTensor:
    """The reader has checked that it is inside the file."""
    kind, shape, start = tensor.tensor_type.name, tuple(tensor.shape[::-1].tolist()), int(tensor.data_offset)
    if kind not in BLOCKS:
        raise StartError(f"{tensor.name!r:.80} has type {kind}, only {', '.join(BLOCKS)} are supported")
    if not shape or 0 in shape or start % BLOCKS["F32"][1]:
        raise StartError(f"{tensor.name!r:.80} has shape {[*shape]} at byte {start}, which is not supported")
    return GgufTensor(kind, shape, start, int(tensor.n_bytes))


def _config(metadata: dict[str, Any], header: GgufHeader, out: Path) -> dict[str, Any]:
    from transformers import PreTrainedConfig  # noqa: PLC0415 - slow

    kind = header.architecture
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if kind not in _DESCRIBED or scaling != "none":
        what = f"{kind!r:.40} with rope.scaling.type {scaling!r:.40}"
        raise StartError(f"its header does not say all about a model of type {what}: put {CONFIG} next to the file")
    config: dict[str, Any] = PreTrainedConfig.get_config_dict(out, gguf_file=WEIGHTS, local_files_only=True)[0]
    if (head_dim := metadata.get(f"{kind}.attention.key_length")) is not None:
        config["head_dim"] = head_dim
    if (tensor := header.tensors.get(_FREQUENCIES)) and tensor.kind == "F32":
        with open(out / WEIGHTS, "rb") as file:
            file.seek(tensor.start)
            factors = struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes))
        rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0}
        rope |= {"attention_factor": 1.0, "original_max_position_embeddings": config["max_position_embeddings"]}
        config["rope_parameters"] = rope | {"rope_theta": config.pop("rope_theta", 10000.0)}
    return config


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    try:
        convert_here(Path(sys.argv[1]))
    except StartError as error:
        sys.exit(str(error))
