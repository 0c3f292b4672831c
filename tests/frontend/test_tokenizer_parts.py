"""Long texts in parts: the tokens of the whole for every family that is cut, and no cut where that is not certain."""

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizer_families as zoo
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_families import Families
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tgis.frontend import tokenizer as module
from tgis.frontend.tokenizer import Tokenizer, Wanted
from tgis.frontend.tokenizer_properties import CutRule, cut_rule, max_bytes_per_token

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
CUT = ["gpt2", "neox", "mistral", "byte_fallback", "metaspace", "word_piece", "word_suffix", *PRE_TOKENIZERS]
WORDS = ["a", "I", "5", "12", "don't", "The", "word", ".", "!?", "\n", "\r\n", " ", "  ", "é", "e\u0301", "中"]
WORDS += ["👩🏽\u200d🚒", "</s>", "<s>", "<|endoftext|>", "▁", "\u0301", "\t", "\u00a0", "<0x41>"]


@contextmanager
def small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART", 6)
        yield


@pytest.fixture(scope="module")
def made(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Backend, Tokenizer]]:
    @functools.cache
    def make(family: str) -> tuple[Backend, Tokenizer]:
        backend = Backend.from_str(zoo.description("gpt2" if family in PRE_TOKENIZERS else family, cache_dir))
        if family in PRE_TOKENIZERS:
            backend.pre_tokenizer = PRE_TOKENIZERS[family]()
        directory = zoo.write(tmp_path_factory.mktemp(family), backend.to_str())
        return backend, Tokenizer.load(directory, workers=2)

    return make


@pytest.mark.parametrize("family", CUT)
@settings(max_examples=40)  # for each of many families
@given(text=st.lists(st.sampled_from(WORDS) | st.text("ab ", max_size=9), max_size=40).map("".join))
@example("one two three four five six")
@example("1 2 3 4 5 6 7 8 9 0 12 345 6789 0 a 1 b")
@example("a </s> b</s> c </s>d e f g h i j k l")
def test_parts_give_the_tokens_of_the_whole(made: Any, family: str, text: str) -> None:
    backend, tokenizer = made(family)
    whole = backend.encode(text)
    spans = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in whole.offsets]
    wants = [Wanted(), Wanted(offsets=True), Wanted(keep=0), Wanted(keep=3), Wanted(keep=5, enough=4)]
    wants.append(Wanted(special_tokens=False))

    async def run() -> list[list[module.Encoding]]:
        return [await tokenizer.encode([text, "b"], wanted) for wanted in wants]

    with small_parts():
        (all_ids, _), (placed, _), (counted, _), (kept, _), (last, _), (plain, _) = asyncio.run(run())
    assert (all_ids.ids, all_ids.num_tokens, list(all_ids.offsets)) == (whole.ids, len(whole.ids), [])
    assert (placed.ids, list(placed.offsets)) == (whole.ids, spans)
    assert (counted.ids, counted.num_tokens) == ([], len(whole.ids))
    assert (kept.ids, kept.num_tokens) == (whole.ids[-3:], len(whole.ids))
    assert last.ids == whole.ids[-5:]
    assert plain.ids == backend.encode(text, add_special_tokens=False).ids
    assert last.num_tokens == len(whole.ids) or len(whole.ids) > last.num_tokens > 4
    assert tokenizer.truncate(last.ids, 4) == tokenizer.truncate(whole.ids, 4)


@pytest.mark.parametrize("family", CUT)
def test_only_the_end_of_a_truncated_text_is_tokenized(made: Any, family: str) -> None:
    backend, tokenizer = made(family)
    text = "several words and 1 number " * 20_000
    (encoding,) = asyncio.run(tokenizer.encode([text], Wanted(keep=65, enough=64)))
    assert 64 < encoding.num_tokens < 20_000
    assert encoding.ids[1:] == backend.encode(text[-2700:]).ids[-64:]


def test_a_text_that_cannot_be_cut_is_tokenized_as_a_whole(made: Any) -> None:
    backend, tokenizer = made("gpt2")
    for text in ("词" * 100_000, "word " * 20_000 + "x" * 100_000, "a." * 60_000):
        (encoding,) = asyncio.run(tokenizer.encode([text], Wanted(keep=9, enough=8)))
        assert encoding.ids[1:] == backend.encode(text).ids[-8:]


RULES = {family: CutRule(drops_space=False, keeps_offsets=True) for family in CUT}
RULES |= {"mistral": CutRule(True, False), "byte_fallback": CutRule(True, False)}
RULES |= {"no_decoder": RULES["gpt2"], "word_suffix_sequence": RULES["gpt2"]}


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_what_is_cut(families: Families, family: str) -> None:
    assert cut_rule(json.loads(families(family)[0].to_str())) == RULES.get(family)


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
    assert cut_rule(gpt2(families)) is not None
    assert cut_rule(gpt2(families, **changes)) is None


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
