"""Digests of the files that decide what a model answers: weights, configuration, tokenizer and chat template."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

_MODEL_FILES = ("config.json", "generation_config.json")
_TEXT_FILES = (
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "special_tokens_map.json"),
    *("tokenizer.json", "tokenizer_config.json"),
)


def deciding_files(weights: Iterable[Path], model: Path, texts: Path) -> list[Path]:
    """The files that decide answers: the weights, and those in the directories of the model and of the tokenizer."""
    others = [*(model / name for name in _MODEL_FILES), *(texts / name for name in _TEXT_FILES)]
    return [*weights, *filter(Path.is_file, others)]


def digest_file(path: Path) -> bytes:
    """The digest of the name and every byte of a file. SHA-256 is the fastest of hashlib on CPUs that have
    instructions for it, 0.6 s a GiB (AMD EPYC, Zen 5).
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(path.name.encode())
    return digest.digest()
