"""What is certain about a tokenizer: a text that is cut keeps its tokens, and what is not certain is not cut."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizer_families as zoo
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizer_families import Families
from tokenizers import Encoding, Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tgis.frontend import tokenizer as module
from tgis.frontend.tokenizer import Tokenizer, Wanted
from tgis.frontend.tokenizer_properties import dropped_at_cut, max_bytes_per_token

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {  # instead of that of GPT-2
    "llama3": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    ),
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    "no_regex": lambda: pre_tokenizers.ByteLevel(False, use_regex=False),
    "roberta": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
}
CUT = ["gpt2", "neox", "mistral", "byte_fallback", "metaspace", "word_piece", "word_suffix", "word_suffix_sequence"]
CUT += ["no_decoder", *PRE_TOKENIZERS]
WORDS = [
    "a",
    "I",
    "5",
    "12",
    "don't",
    "The",
    "word",
    ".",
    "!?",
    "\n",
    "\r\n",
    " ",
    "  ",
    "é",
    "e\u0301",
    "中",
    "👩🏽‍🚒",
]
WORDS += ["</s>", "<s>", "<|endoftext|>", "▁", "\u0301", "\t", "\u00a0", "<0x41>"]


@pytest.fixture(scope="module")
def made(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Backend, Tokenizer]]:
    known: dict[str, tuple[Backend, Tokenizer]] = {}

    def make(family: str) -> tuple[Backend, Tokenizer]:
        if family not in known:
            backend = Backend.from_str(zoo.description("gpt2" if family in PRE_TOKENIZERS else family, cache_dir))
            if family in PRE_TOKENIZERS:
                backend.pre_tokenizer = PRE_TOKENIZERS[family]()
            directory = zoo.write(tmp_path_factory.mktemp(family), backend.to_str())
            known[family] = backend, Tokenizer.load(directory, workers=2)
        return known[family]

    return make


def encode(tokenizer: Tokenizer, *texts: str, **wanted: Any) -> list[module.Encoding]:
    return asyncio.run(tokenizer.encode(texts, Wanted(**wanted)))


def longest_step(whole: Encoding, text: str) -> int:
    """The most characters from the beginning of a token to that of the next one, or to the end of the text."""
    starts = [start for start, end in whole.offsets if end > 0]
    return max((after - before for before, after in pairwise([0, *starts, len(text)])), default=0) or 1


@pytest.mark.parametrize("family", [*zoo.FAMILIES, *PRE_TOKENIZERS])
@given(
    text=st.lists(st.sampled_from(WORDS) | st.text("ab ", max_size=9), max_size=40).map("".join),
    limit=st.integers(1, 6),
)
@example("one two three four five six", 2)
@example("1 2 3 4 5 6 7 8 9 0 12 345 6789 0 a 1 b", 1)
@example("a </s> b</s> c </s>d e f g h i j k l", 1)
def test_a_truncated_text_keeps_the_tokens_of_the_whole(made: Any, family: str, text: str, limit: int) -> None:
    backend, tokenizer = made(family)
    whole = backend.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "max_bytes_per_token", longest_step(whole, text))  # the least that is true of the text
        (last,) = encode(tokenizer, text, keep=limit + 1, enough=limit)
        (plain,) = encode(tokenizer, text, keep=limit, enough=limit, special_tokens=False)
    assert last.ids == whole.ids[-limit - 1 :]
    assert last.num_tokens == len(whole.ids) or len(whole.ids) > last.num_tokens > limit
    assert tokenizer.truncate(last.ids, limit) == tokenizer.truncate(whole.ids, limit)
    assert plain.ids == backend.encode(text, add_special_tokens=False).ids[-limit:]


@pytest.mark.parametrize("family", [*zoo.FAMILIES, *PRE_TOKENIZERS])
def test_only_what_is_certain_is_cut(made: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, tokenizer = made(family)
    text = "I I 5 5 A A " * 50
    num_tokens = len(backend.encode(text).ids)
    for bound in (5, None):
        monkeypatch.setattr(tokenizer, "max_bytes_per_token", bound)
        (encoding,) = encode(tokenizer, text, keep=5, enough=4)
        assert (encoding.num_tokens < num_tokens / 2) == (family in CUT and bound is not None)
        assert encoding.ids == backend.encode(text).ids[-5:]


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_only_the_end_of_a_truncated_text_is_tokenized(made: Any, family: str) -> None:
    backend, tokenizer = made(family)
    text = "several words and 1 number " * 20_000
    (encoding,) = encode(tokenizer, text, keep=65, enough=64)
    assert 64 < encoding.num_tokens < 5_000
    assert encoding.ids[1:] == backend.encode(text[-2700:]).ids[-64:]
    (placed,) = encode(tokenizer, text, offsets=True, keep=65, enough=64)
    assert placed.num_tokens == len(backend.encode(text).ids)


@pytest.mark.parametrize("text", ["词" * 100_000, "word " * 20_000 + "x" * 100_000, "a." * 60_000])
def test_where_no_place_to_cut_is_near_more_is_tokenized(made: Any, text: str) -> None:
    backend, tokenizer = made("gpt2")
    (encoding,) = encode(tokenizer, text, keep=9, enough=8)
    assert encoding.ids == backend.encode(text).ids[-9:]


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_what_is_cut(families: Families, family: str) -> None:
    dropped = {"mistral": 1, "byte_fallback": 1} | dict.fromkeys(set(CUT) - {"mistral", "byte_fallback"}, 0)
    assert dropped_at_cut(json.loads(families(family)[0].to_str())) == dropped.get(family)


def gpt2(families: Families, **changes: Any) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(families("gpt2")[0].to_str())
    description["model"] |= changes.pop("model", {})
    return description | changes


def added(**properties: object) -> list[dict[str, object]]:
    return [{"id": 0, "content": "<x>", "lstrip": False, "rstrip": False} | properties]


NO_REGEX = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dropout": 0.1}},
        {"added_tokens": added(rstrip=True)},
        {"added_tokens": added(content="two words")},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a b"}, "content": "c"}},
        {"normalizer": {"type": "Future"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Future"}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}},
        {"pre_tokenizer": NO_REGEX, "model": {"ignore_merges": True}},
        {"pre_tokenizer": NO_REGEX, "model": {"type": "WordLevel"}},
        {"pre_tokenizer": NO_REGEX, "model": {"vocab": {"Ġ": 0, "aĠ": 1}}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r".+ .+"}, "behavior": "Isolated", "invert": False}},
    ],
)
def test_what_is_not_cut(families: Families, changes: dict[str, Any]) -> None:
    assert dropped_at_cut(gpt2(families)) is not None
    assert dropped_at_cut(gpt2(families, **changes)) is None


@pytest.mark.parametrize(("family", "longest"), [("gpt2", 128), ("mistral", 48), ("neox", None), ("metaspace", None)])
def test_bytes_of_the_longest_token(families: Families, family: str, longest: int | None) -> None:
    assert max_bytes_per_token(json.loads(families(family)[0].to_str())) == longest


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens": added(lstrip=True)},
        {"added_tokens": added(rstrip=True)},
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}},
        {"model": {"type": "Unigram"}},
        {"model": {"vocab": {"a": 0}}},
    ],
)
def test_tokens_without_a_bound(families: Families, changes: dict[str, Any]) -> None:
    assert max_bytes_per_token(gpt2(families)) == 128
    assert max_bytes_per_token(gpt2(families, **changes)) is None


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
@given(text=st.text(max_size=60) | st.text(" \n-=", max_size=300))
def test_no_token_stands_for_more_bytes(families: Families, family: str, text: str) -> None:
    backend, tokenizer = families(family)
    assert tokenizer.max_bytes_per_token is not None
    assert len(text.encode()) <= len(backend.encode(text).ids) * tokenizer.max_bytes_per_token
