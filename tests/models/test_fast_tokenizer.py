"""Conversion of slow tokenizers, for a server's cache and for the model's directory."""

import io
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from model_directories import write_model
from real_tokenizers import write_header
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import Tokenizer

from tgis.errors import StartError
from tgis.models import staging
from tgis.models.convert import gguf
from tgis.models.convert.fast_tokenizer import _conversion_problem, add_tokenizer, convert_here, ensure_tokenizer
from tgis.models.files import ModelFiles, find_model, special_tokens

CHILD = staging.run_child


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in this process, since importing transformers takes seconds; some tests restore the real child."""

    def run(command: list[str], seconds: float | None) -> str | None:
        try:
            convert_here(*command[3:])
        except (SystemExit, Exception) as left:  # noqa: BLE001
            return str(left).splitlines()[-1]
        return None

    monkeypatch.setattr(staging, "run_child", run)


def test_converted_once(slow_gpt2: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "run_child", CHILD)
    with ThreadPoolExecutor(2) as pool:  # two servers start at the same time
        first, second = pool.map(lambda _: ensure_tokenizer(slow_gpt2, tmp_path), range(2))
    assert first == second
    assert [path for path in (tmp_path / "tokenizers").iterdir() if path.is_dir()] == [first]
    assert first.stat().st_mode & 0o777 == 0o755
    tokenizer = Tokenizer.from_file(str(first / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["hell", "o"]
    assert tokenizer.token_to_id(special_tokens(first)["eos_token"]) == 256 + 3  # after the bytes and the merges

    monkeypatch.setattr(staging, "run_child", lambda command, seconds: "not again")
    assert ensure_tokenizer(slow_gpt2, tmp_path) == first
    assert ensure_tokenizer(ModelFiles(first, {}, {}), tmp_path / "cache") == first
    (slow_gpt2.path / "merges.txt").write_text("#version: 0.2\nh e\n")
    with pytest.raises(StartError, match="not again"):
        ensure_tokenizer(slow_gpt2, tmp_path)


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    """transformers would silently write an empty vocabulary."""
    config = {"model_type": "gpt2", "vocab_size": 50257}
    model = find_model(str(write_model(tmp_path / "m", config=config)), None, None)
    with pytest.raises(StartError, match=r"no tokenizer\.json, .* vocabulary files are missing") as caught:
        ensure_tokenizer(model, tmp_path / "cache")
    assert str(caught.value).startswith(str(model.path))
    assert "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "cache" / "tokenizers").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("size", "inner", "found"),
    [(10, {"vocab": [0] * 5}, None), (10, {"vocab": [0] * 4}, "4 of 10"), (0, {}, "0 of 1"), ("x", None, "0 of 1")],
)
def test_half_of_a_vocabulary_is_missing(size: object, inner: object, found: str | None, tmp_path: Path) -> None:
    write_model(tmp_path, tokenizer={"model": inner})
    problem = found and f"vocabulary files are missing ({found} tokens found)"
    assert _conversion_problem(ModelFiles(tmp_path, {"vocab_size": size}, {}), tmp_path) == problem


def test_the_code_of_a_model_is_not_run(slow_gpt2: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    write_model(slow_gpt2.path, tokenizer_config=settings, config={"model_type": "evil"})
    (slow_gpt2.path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(StartError, match="none can be made"):
        ensure_tokenizer(slow_gpt2, tmp_path / "cache")
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr(staging, "run_child", lambda command, seconds: None)  # transformers has saved no fast one
    with pytest.raises(StartError, match=r"none can be made: it has a tokenizer that only Python code can run$"):
        ensure_tokenizer(slow_gpt2, tmp_path / "cache")


BPE = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
UNIGRAM = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
SPACES = {"remove_extra_whitespaces": True}
SENTENCEPIECE: dict[str, tuple[str, str, dict[str, Any], list[int], list[int]]] = {  # ids before and after a text
    "Llama": ("llama", "tokenizer.model", BPE, [1], []),
    "Llama that drops spaces": ("llama", "tokenizer.model", BPE | SPACES, [1], []),
    "without a space before": ("llama", "tokenizer.model", BPE | {"add_dummy_prefix": False}, [1], []),
    "unigram with bytes": ("llama", "tokenizer.model", {"byte_fallback": True}, [1], []),
    "T5": ("t5", "spiece.model", UNIGRAM, [], [1]),
    "mT5": ("mt5", "spiece.model", UNIGRAM | {"byte_fallback": True}, [], [1]),
}
TEXTS = [
    *("Hello world", "", " ", "   ", "  leading", "trailing  ", "a  b   c", "tab\tand\nnewline\n\n", "\n", "x" * 200),
    *("Zażółć gęślą jaźń 日本語 🙂 😀😀", "1234567890 12 3.14", "def f(x):\n    return x  # c", "ﬁ ½ ① Å e\u0301"),
    *("\u00a0nbsp\u3000wide\u200bzero", "a\x00b", "▁under▁", "🏳️\u200d🌈 family", "don't", "مرحبا", " " * 37 + "x"),
]


def train(file: Path, options: dict[str, Any]) -> sentencepiece.SentencePieceProcessor:
    """On the code of this module."""
    proto, lines = io.BytesIO(), [line for line in Path(__file__).read_text().splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=proto, vocab_size=440, num_threads=1, minloglevel=2, **options
    )
    file.write_bytes(proto.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())


def write_gguf(file: Path, oracle: sentencepiece.SentencePieceProcessor, unigram: bool) -> None:
    """The header that llama.cpp's converter makes of a model."""
    model = ModelProto.FromString(oracle.serialized_model_proto())
    names = {"tokens": "piece", "scores": "score", "token_type": "type"}
    fields: dict[str, Any] = {key: [getattr(piece, name) for piece in model.pieces] for key, name in names.items()}
    ids = {"bos_token_id": oracle.bos_id(), "eos_token_id": oracle.eos_id(), "unknown_token_id": oracle.unk_id()}
    fields |= {name: number for name, number in ids.items() if number >= 0}
    fields |= {"pre": "default", "add_bos_token": not unigram, "add_eos_token": unigram}
    if unigram:
        spec = model.normalizer_spec
        fields["remove_extra_whitespaces"] = spec.remove_extra_whitespaces
        fields["precompiled_charsmap"] = [*spec.precompiled_charsmap]
    kind = "t5" if unigram else "llama"
    write_header(file, architecture=kind, model=kind, **fields)


@pytest.mark.parametrize("name", [*SENTENCEPIECE, "Llama, gguf", "T5, gguf"])
def test_sentencepiece_models_give_the_tokens_of_sentencepiece(name: str, tmp_path: Path) -> None:
    """Only texts with special tokens in them differ."""
    family, file, options, before, after = SENTENCEPIECE[name.partition(",")[0] if "gguf" in name else name]
    path = write_model(tmp_path / "model", config={"model_type": family, "vocab_size": 440})
    if name == "T5, gguf":  # the package gguf reads the default rules of normalization a byte at a time
        (tmp_path / "rules.tsv").write_text("FB01\t66 69\n")
        options = options | {"normalization_rule_tsv": str(tmp_path / "rules.tsv")}
    oracle = train(path / file, options)
    if "gguf" in name:
        write_gguf(tmp_path / "model.gguf", oracle, unigram=options is not BPE)
        write_model(tmp_path, config={"model_type": family})
        gguf.convert_here(tmp_path)
    else:
        convert_here(str(path), str(tmp_path))
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    draw = random.Random(0)
    pieces = ["a", "the", " ", "  ", "\n", "é", "日", "🙂", "1", "23", ".", "_", "def", "self", "tokenizer"]
    texts = [*TEXTS, *("".join(draw.choices(pieces, k=draw.randint(1, 25))) for _ in range(30))]
    for text, found in zip(texts, made.encode_batch(texts), strict=True):
        assert found.ids == before + oracle.encode(text) + after, text
    assert made.decode(oracle.encode("def self")) == "def self"


@pytest.mark.parametrize("add_bos", [True, False])
def test_settings_say_whether_a_text_begins_with_a_token(add_bos: bool, tmp_path: Path) -> None:
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": add_bos}
    path = write_model(tmp_path, config={"model_type": "llama"}, tokenizer_config=settings)
    oracle = train(path / "tokenizer.model", BPE)
    convert_here(str(path), str(path))
    found = Tokenizer.from_file(str(path / "tokenizer.json")).encode("abc").ids
    assert found == [1] * add_bos + oracle.encode("abc")


def test_a_file_that_is_no_sentencepiece_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", config={"model_type": "llama"})
    (path / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(StartError, match=r"none can be made: .*sentencepiece.ModelProto"):
        add_tokenizer(find_model(str(path), None, None), None)


def test_the_directory_of_the_model_gets_only_tokenizer_json(slow_gpt2: ModelFiles) -> None:
    """Its other files are symlinks to blobs, which other revisions share."""
    blob = slow_gpt2.path.parent / "blob"
    settings = slow_gpt2.path / "tokenizer_config.json"
    settings.rename(blob)
    settings.symlink_to(blob)
    before = {path.name: path.read_bytes() for path in slow_gpt2.path.iterdir()}
    assert add_tokenizer(slow_gpt2, None) == f"{slow_gpt2.path}/tokenizer.json was made"
    after = {path.name: path.read_bytes() for path in slow_gpt2.path.iterdir()}
    assert Tokenizer.from_str(after.pop("tokenizer.json").decode()).encode("hello").tokens == ["hell", "o"]
    assert after == before
    assert settings.is_symlink()


def test_another_directory_gets_the_whole_tokenizer(slow_gpt2: ModelFiles, tmp_path: Path) -> None:
    out = write_model(tmp_path / "out", tokenizer_config={"old": True})
    assert add_tokenizer(slow_gpt2, out) == f"{out}/tokenizer.json was made"
    assert not (slow_gpt2.path / "tokenizer.json").exists()
    assert find_model(str(out), None, None).config == {"model_type": "gpt2"}
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("hello").tokens == ["hell", "o"]
    assert "old" not in (out / "tokenizer_config.json").read_text()
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
