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
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tgis import __version__
from tgis.errors import StartError, file_errors, library_errors
from tgis.models import staging
from tgis.models.convert.weights import needs_conversion
from tgis.models.files import find_directory, read_json
from tgis.models.gguf import BLOCKS, HEADER, WEIGHTS, GgufHeader, GgufTensor

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_VOCABULARIES = (TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json")
_COMPANIONS = frozenset({
    CONFIG, "generation_config.json", *_VOCABULARIES, "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates",
})  # fmt: skip
CONVERT_SECONDS = 600
_MAX_MEMORY_BYTES = 8 << 30
_DESCRIBED = frozenset({"llama", "qwen2", "qwen3"})  # of which transformers knows all that llama.cpp writes
_FREQUENCIES = "rope_freqs.weight"  # divisors of the frequencies of rotary embeddings, as in Llama 3.1
# Pre-tokenizers that split as GPT-2 does, and those that also split at every digit
_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo"})
_GPT2_AND_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_SENTENCEPIECE = {"t5": 1, "llama": 2}  # unigram and BPE, as in sentencepiece_model.proto
_BYTE = 6  # the type of a token there


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
    metadata, header = read_file(out / WEIGHTS)
    (out / HEADER).write_bytes(msgspec.json.encode(header))
    config = out / CONFIG
    content = read_json(config) if config.is_file() else _config(metadata, header, out)
    config.unlink(missing_ok=True)  # it may be a link
    config.write_text(json.dumps(content | {"quantization_config": {"quant_method": "gguf"}}))
    if not any((out / name).is_file() for name in _VOCABULARIES):
        _make_tokenizer(metadata, out)


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
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config["eos_token_id"] = [token for token in dict.fromkeys(ends) if token is not None]
    if (tensor := header.tensors.get(_FREQUENCIES)) and tensor.kind == "F32":
        factors = np.fromfile(out / WEIGHTS, "<f4", tensor.num_bytes // 4, offset=tensor.start).tolist()
        rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0}
        rope |= {"attention_factor": 1.0, "original_max_position_embeddings": config["max_position_embeddings"]}
        config["rope_parameters"] = rope | {"rope_theta": config.pop("rope_theta", 10000.0)}
    return config


def _make_tokenizer(metadata: dict[str, Any], out: Path) -> None:
    from tokenizers import pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    from tgis.models.convert.sentencepiece_model import follow_sentencepiece  # noqa: PLC0415

    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", *_SENTENCEPIECE):
        raise StartError(f"its tokenizer {kind!r:.40} is unknown: put {TOKENIZER} next to the file")
    splitter = metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2":
        _check_pre_tokenizer(splitter)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out, gguf_file=WEIGHTS, local_files_only=True)
    if kind == "gpt2" and splitter in _GPT2_AND_DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.save_pretrained(out)
    if kind in _SENTENCEPIECE:
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
        follow_sentencepiece(_sentencepiece(kind, metadata), out / TOKENIZER, {"add_bos_token": add_bos})


def _sentencepiece(kind: str, metadata: dict[str, Any]) -> Any:
    """The sentencepiece model that a file was made of."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # noqa: PLC0415

    prefix = "tokenizer.ggml."
    said = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    model = ModelProto()
    for piece, score, type_ in zip(said["tokens"], said["scores"], said["token_type"], strict=True):
        model.pieces.add(piece=piece, score=score, type=type_)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = _SENTENCEPIECE[kind], _BYTE in said["token_type"]
    trainer.bos_id, trainer.unk_id = said.get("bos_token_id", -1), said.get("unknown_token_id", 0)
    trainer.unk_piece = said["tokens"][trainer.unk_id]
    normalizer.add_dummy_prefix = said.get("add_space_prefix", True)
    normalizer.remove_extra_whitespaces = said.get("remove_extra_whitespaces", False)
    normalizer.precompiled_charsmap = bytes(said.get("precompiled_charsmap", b""))
    return model


def _check_pre_tokenizer(name: str | None) -> None:
    """StartError unless it is known how llama.cpp splits texts before byte-level BPE."""
    from transformers.integrations.gguf import gguf_tokenizer_mapping  # noqa: PLC0415

    splits = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if splits is None:  # 5.17, which does not add the first token of a text
        raise StartError(f"this release of transformers is too old for its tokenizer: put {TOKENIZER} next to the file")
    if name not in splits.keys() | _GPT2 | _GPT2_AND_DIGITS:
        raise StartError(f"its pre-tokenizer {name!r:.40} is unknown: put {TOKENIZER} next to the file")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    try:
        convert_here(Path(sys.argv[1]))
    except StartError as error:
        sys.exit(str(error))
