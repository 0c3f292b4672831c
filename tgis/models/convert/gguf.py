"""Makes a directory that transformers can read for a GGUF file: its configuration and tokenizer come from files beside
it, else from its header.

A child process runs this file: `python -m tgis.models.convert.gguf DIRECTORY`.
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tgis import __version__
from tgis.errors import StartError, file_errors
from tgis.models import staging
from tgis.models.convert.weights import needs_conversion
from tgis.models.files import find_directory, read_json
from tgis.models.gguf import WEIGHTS, GgufHeader, read_header

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_VOCABULARIES = (TOKENIZER, "tokenizer.model", "spiece.model", "vocab.json")
_BESIDE = frozenset({
    CONFIG, "generation_config.json", *_VOCABULARIES, "merges.txt", "added_tokens.json", "special_tokens_map.json",
    "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates",
})  # fmt: skip
CONVERT_SECONDS = 600
_DESCRIBED = frozenset({"llama", "qwen2", "qwen3"})  # of which transformers knows all that llama.cpp writes
_FREQUENCIES = "rope_freqs.weight"  # divisors of the frequencies of rotary embeddings, as in Llama 3.1
_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo"})  # pre-tokenizers that split as GPT-2 does
_GPT2_AND_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})  # and at every digit
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
    read_header(file)
    with file_errors(f"cannot keep the configuration and tokenizer of {file}"):
        beside = [path for path in file.parent.iterdir() if path.name in _BESIDE]
        key = staging.files_key([file, *beside], __version__, importlib.metadata.version("transformers"))
        return str(staging.made_once(cache_dir / "gguf" / key, functools.partial(_make, file, beside)))


def find_gguf(name: str, revision: str | None = None, hub_cache: str | None = None) -> Path | None:
    """The file of this name, or in the directory of this name, which may be in the hub cache."""
    if name.endswith(".gguf") and os.path.isfile(name):
        return Path(name)
    try:
        path = find_directory(name, revision, hub_cache, ".")
    except (StartError, OSError):  # which are said again where other weights are not found, either
        return None
    found = sorted(path.glob("*.gguf"))
    if not found or any(path.glob("*.safetensors")) or needs_conversion(path):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise StartError(f"{path} has {len(found)} GGUF files, MODEL_NAME must name one of them: {names:.500}")
    return found[0]


def _make(file: Path, beside: list[Path], out: Path) -> None:
    for path in beside:
        (out / path.name).symlink_to(path.resolve())
    (out / WEIGHTS).symlink_to(file.resolve())
    command = [sys.executable, "-m", "tgis.models.convert.gguf", str(out)]
    if reason := staging.run_child(command, CONVERT_SECONDS):
        raise StartError(f"{file}: {reason}")


def convert_here(out: Path) -> None:
    """Write what no file beside the GGUF file says; the parent reports exceptions."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers
    header, config = read_header(out / WEIGHTS), out / CONFIG
    content = read_json(config) if config.is_file() else _config(header, out)
    config.unlink(missing_ok=True)  # it may be a link
    config.write_text(json.dumps(content | {"quantization_config": {"quant_method": "gguf"}}))
    if not any((out / name).is_file() for name in _VOCABULARIES):
        _make_tokenizer(header.metadata, out)


def _config(header: GgufHeader, out: Path) -> dict[str, Any]:
    from transformers import PreTrainedConfig  # noqa: PLC0415 - slow

    kind, metadata = header.architecture, header.metadata
    scaling = metadata.get(f"{kind}.rope.scaling.type", "none")
    if kind not in _DESCRIBED or scaling != "none":
        what = f"{kind!r:.40} with rope.scaling.type {scaling!r:.40}"
        raise StartError(f"its header does not say all about a model of type {what}: put {CONFIG} beside the file")
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
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    from tgis.models.convert.sentencepiece_model import follow_sentencepiece  # noqa: PLC0415

    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", *_SENTENCEPIECE):
        raise StartError(f"its tokenizer {kind!r:.40} is unknown: put {TOKENIZER} beside the file")
    splits = _pre_tokenizer(metadata.get("tokenizer.ggml.pre")) if kind == "gpt2" else None
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out, gguf_file=WEIGHTS, local_files_only=True)
    if splits is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = splits
    tokenizer.save_pretrained(out)
    if kind in _SENTENCEPIECE:
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
        follow_sentencepiece(_sentencepiece(kind, out), out / TOKENIZER, {"add_bos_token": add_bos})


def _sentencepiece(kind: str, out: Path) -> Any:
    """The model that a file was made of."""
    from gguf import GGUFReader  # noqa: PLC0415 - an extra
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # noqa: PLC0415

    fields = GGUFReader(out / WEIGHTS).fields
    said = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
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


def _pre_tokenizer(name: str | None) -> Any:
    """What splits texts before byte-level BPE."""
    from tokenizers import Regex, pre_tokenizers  # noqa: PLC0415
    from transformers.integrations.gguf import gguf_tokenizer_mapping  # noqa: PLC0415

    splits = getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if splits is None:  # 5.17 does not add the first token of a text, either
        raise StartError(f"this release of transformers is too old for its tokenizer: put {TOKENIZER} beside the file")
    byte_level = functools.partial(pre_tokenizers.ByteLevel, add_prefix_space=False)
    if name in splits:
        split = pre_tokenizers.Split(Regex(splits[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level(use_regex=False)])
    if name not in _GPT2 | _GPT2_AND_DIGITS:
        raise StartError(f"its pre-tokenizer {name!r:.40} is unknown: put {TOKENIZER} beside the file")
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()][name in _GPT2 :])


if __name__ == "__main__":
    try:
        convert_here(Path(sys.argv[1]))
    except StartError as error:
        sys.exit(str(error))
