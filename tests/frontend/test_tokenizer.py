"""tgis.frontend.tokenizer: ids and offsets against plain calls of the library, truncation, broken files."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import tokenizer_families as zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import Families
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tgis.errors import InvalidRequest, StartError
from tgis.frontend.tokenizer import EncodeOptions, Encoding, Tokenizer


def encode(tokenizer: Tokenizer, *texts: str, offsets: bool = False) -> list[Encoding]:
    return asyncio.run(tokenizer.encode(texts, EncodeOptions(offsets=offsets)))


def naive_offsets(backend: Backend, text: str) -> list[tuple[int, int]]:
    spans = backend.encode(text).offsets
    return [(len(text[:start].encode()), len(text[:end].encode())) for start, end in spans]


@pytest.mark.parametrize("family", zoo.FAMILIES)
@settings(max_examples=30)  # for each of many families
@given(text=st.text(max_size=40) | st.sampled_from(zoo.SAMPLES))
def test_any_text(families: Families, family: str, text: str) -> None:
    backend, tokenizer = families(family)
    (plain,), (placed,) = encode(tokenizer, text), encode(tokenizer, text, offsets=True)
    assert plain.ids == placed.ids == backend.encode(text).ids
    assert list(placed.offsets) == naive_offsets(backend, text)


@pytest.mark.parametrize("texts", [["word and word " * 1000], ["a word "] * 1000], ids=["one", "many"])
@pytest.mark.parametrize("offsets", [False, True])
def test_too_many_tokens_are_refused(families: Families, texts: list[str], offsets: bool) -> None:
    backend, tokenizer = families("gpt2")
    num_tokens = sum(len(backend.encode(text).ids) for text in texts)
    exactly = asyncio.run(tokenizer.encode(texts, EncodeOptions(offsets=offsets, max_tokens=num_tokens)))
    assert [encoding.ids for encoding in exactly] == [backend.encode(text).ids for text in texts]
    with pytest.raises(InvalidRequest, match=f"the text has more than {num_tokens - 1} tokens"):
        asyncio.run(tokenizer.encode(texts, EncodeOptions(offsets=offsets, max_tokens=num_tokens - 1)))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_only_the_last_tokens_are_returned_and_limited(families: Families, family: str) -> None:
    backend, tokenizer = families(family)
    text = "wörd and word " * 100
    ids, offsets = backend.encode(text).ids, naive_offsets(backend, text)
    for keep_last in (5, 0):
        options = EncodeOptions(offsets=True, keep_last=keep_last, max_tokens=5)
        (encoding,) = asyncio.run(tokenizer.encode([text], options))
        assert (encoding.ids, encoding.num_tokens) == (ids[len(ids) - keep_last :], len(ids))
        assert list(encoding.offsets) == offsets[len(ids) - keep_last :]
    assert Encoding.of_ids(ids, keep_last=5).ids == ids[-5:]


def test_truncation_and_padding_of_the_file_are_off(cache_dir: Path, tmp_path: Path) -> None:
    backend = Backend.from_str(zoo.description("byte_level", cache_dir))
    plain = backend.encode("The first word, the second word.").ids
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.load(zoo.write(tmp_path, backend.to_str()), workers=1)
    assert encode(tokenizer, "The first word, the second word.")[0].ids == plain


def test_a_special_token_after_the_text_is_not_bos(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"</s>": 0, "B": 1}, []))  # drops the unknown A
    backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 0)])
    tokenizer = Tokenizer.load(zoo.write(tmp_path, backend.to_str()), workers=1)
    assert encode(tokenizer, "A")[0].ids == [0]
    assert tokenizer.truncate([1, 1, 0], 2) == [1, 0]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"tokenizer_config": {"eos_token": "<end>"}}, (2,)),
        ({"tokenizer_config": {"eos_token": "B"}}, (1,)),
        ({"tokenizer_config": {"eos_token": {"content": "<end>"}}}, (2,)),
        ({"tokenizer_config": {}, "special_tokens_map": {"eos_token": "<end>"}}, (2,)),
        ({"tokenizer_config": {"eos_token": "<new>"}}, (3,)),
        *(({"tokenizer_config": {"eos_token": named}}, ()) for named in ("", None, 7)),
        ({}, ()),
    ],
)
def test_the_token_that_is_called_eos(written: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"A": 0, "B": 1}))
    backend.add_special_tokens(["<end>"])
    assert Tokenizer.load(zoo.write(tmp_path, backend.to_str(), **written), workers=1).eos_ids == expected


@pytest.mark.parametrize("family", ["byte_fallback", "metaspace"])  # BOS before, EOS after a text
def test_special_tokens_can_be_left_out(families: Families, family: str, cache_dir: Path, tmp_path: Path) -> None:
    backend, _ = families(family)
    directory = zoo.write(tmp_path, zoo.description(family, cache_dir))
    tokenizer = Tokenizer.load(directory, workers=1, add_special_tokens=False)
    plain = backend.encode(zoo.SAMPLES[0], add_special_tokens=False).ids
    (encoding,) = asyncio.run(families(family)[1].encode([zoo.SAMPLES[0]], EncodeOptions(special_tokens=False)))
    assert encoding.ids == plain
    assert plain != backend.encode(zoo.SAMPLES[0]).ids
    for offsets in (False, True):
        assert encode(tokenizer, zoo.SAMPLES[0], offsets=offsets)[0].ids == plain
    assert tokenizer.truncate(plain, 3) == plain[-3:]  # no BOS is put back


def test_token_texts_are_raw_vocabulary(families: Families) -> None:
    backend, tokenizer = families("mistral")
    texts = [tokenizer.token_text(i) for i in (2, 13, backend.get_vocab()["▁The"], 1 << 20)]
    assert texts == ["</s>", "<0x0A>", "▁The", ""]
    assert [i for i in range(300) if tokenizer.is_special(i)] == [0, 1, 2]
    assert [tokenizer.special_token_id(text) for text in ("</s>", "▁The")] == [2, None]
    for family in zoo.FAMILIES:  # the highest id may be that of an added token
        backend, tokenizer = families(family)
        assert tokenizer.max_token_id == max(backend.get_vocab().values())


def test_the_most_bytes_of_a_token_are_known_where_no_text_is_lost(tmp_path: Path) -> None:
    level = pre_tokenizers.ByteLevel()

    def most(*added: str | AddedToken, steps: Any = (level,), normalizer: Any = None, missing: str = "") -> int | None:
        tokens = [*(set(level.alphabet()) - set(missing)), "ab", "abc"]
        backend = Backend(models.BPE({token: n for n, token in enumerate(tokens)}, [("a", "b"), ("ab", "c")]))
        backend.pre_tokenizer, backend.normalizer = pre_tokenizers.Sequence([*steps]), normalizer
        backend.add_tokens([*added])
        return Tokenizer.load(zoo.write(tmp_path, backend.to_str()), workers=1).max_bytes_per_token

    assert (most(), most("ééé")) == (3, 6)
    losing = [pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit(), pre_tokenizers.BertPreTokenizer()]
    losing += [pre_tokenizers.CharDelimiterSplit("x"), pre_tokenizers.Split("x", "removed")]
    assert [most(steps=[step, level]) for step in losing] == [None] * len(losing)
    assert [most(AddedToken("x", lstrip=left, rstrip=not left)) for left in (False, True)] == [None] * 2
    assert (most(normalizer=normalizers.NFC()), most(steps=()), most(missing="!")) == (None, None, None)


def test_an_unknown_word_without_an_unknown_token_is_an_invalid_request(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(zoo.write(tmp_path, Backend(models.WordLevel({"A": 0})).to_str()), workers=1)
    assert encode(tokenizer, "A")[0].ids == [0]
    with pytest.raises(InvalidRequest, match=r"^tokenizer error "):
        tokenizer.count(["B"])
    for texts in (["A", "B"], ["A"] * 1000 + ["B"]):  # the latter in a thread
        with pytest.raises(InvalidRequest, match=r"^tokenizer error ") as caught:
            encode(tokenizer, *texts)
        assert caught.value.field == "text"


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"model": 1}', '{"version": "1.0", "model": {"type": "?"}}']
)
def test_absent_and_broken_files(tmp_path: Path, content: str | None) -> None:
    with pytest.raises(StartError, match=str(tmp_path / "tokenizer.json")):
        Tokenizer.load(tmp_path if content is None else zoo.write(tmp_path, content), workers=1)


def test_a_tokenizer_that_cannot_encode_a(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="letter A"):
        Tokenizer.load(zoo.write(tmp_path, Backend(models.WordLevel({"B": 0})).to_str()), workers=1)
