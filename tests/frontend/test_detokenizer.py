"""tgis.frontend.detokenizer: incremental text must equal the library's decoding of the whole output."""

from pathlib import Path

import pytest
import tokenizer_families as zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import Families
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tgis.errors import StartError
from tgis.frontend.detokenizer import Detokenizer, TokenDecoder
from tgis.frontend.tokenizer import Tokenizer
from tgis.ipc.lookups import Vocabulary

# Per family: whether a decoder-only model's output may begin with the space of its first word.
KEEPS_FIRST_SPACE = {"byte_fallback", "metaspace", "word_piece", "no_decoder", "mistral"}
UNKNOWN = 1 << 20


def decoder(tokenizer: Tokenizer, *eos: int, encoder_decoder: bool = False, special: bool = False) -> TokenDecoder:
    return TokenDecoder(tokenizer, eos, encoder_decoder=encoder_decoder, output_special_tokens=special)


def pieces(tokens: TokenDecoder, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokens)
    return [detokenizer.add(token_id) for token_id in ids]


def whole(backend: Backend, family: str, ids: list[int], *, encoder_decoder: bool, special: bool = False) -> str:
    """The library's text of the whole output, by the table of decoder types."""
    lead = [] if encoder_decoder or family not in KEEPS_FIRST_SPACE else [_any_word(backend)]
    head = backend.decode(lead, skip_special_tokens=not special)
    text: str = backend.decode([*lead, *ids], skip_special_tokens=not special)
    assert text.startswith(head)
    return text[len(head) :].rstrip("\ufffd")


def byte_ids(backend: Backend, data: bytes) -> list[int]:
    """The tokens that stand for single bytes in vocabularies with byte fallback."""
    vocabulary = backend.get_vocab()
    return [vocabulary[f"<0x{byte:02X}>"] for byte in data]


def _any_word(backend: Backend) -> int:
    return next(i for i in range(300, -1, -1) if backend.decode([i]).strip().isalpha())


def some_ids(backend: Backend, tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, with many of the first ones, which are special tokens and bytes, and with unknown ones.

    Bytes of byte fallback are those of valid text: else the library replaces the whole run, however late.
    """
    size = backend.get_vocab_size()
    upper = range(0x80, 0x100) if "ByteFallback" in tokenizer.decoder_types else ()
    barred = {backend.token_to_id(f"<0x{byte:02X}>") for byte in upper}
    known = st.one_of(st.integers(0, size - 1), st.integers(0, min(260, size - 1)))
    anything = st.one_of(known.filter(lambda one: one not in barred), st.just(UNKNOWN))
    texts = st.text(max_size=5) | st.sampled_from(zoo.SAMPLES)
    text = texts.map(lambda text: backend.encode(text, add_special_tokens=False).ids)
    parts = st.lists(st.one_of(anything.map(lambda one: [one]), text), max_size=20)
    return parts.map(lambda lists: [one for part in lists for one in part])


@pytest.mark.parametrize("family", zoo.FAMILIES)
@settings(max_examples=30)  # for each of many families
@given(data=st.data())
def test_incremental_text_of_any_ids_equals_whole_decoding(
    families: Families, family: str, data: st.DataObject
) -> None:
    backend, tokenizer = families(family)
    ids = data.draw(some_ids(backend, tokenizer))
    special, encoder_decoder = data.draw(st.tuples(st.booleans(), st.booleans()))
    tokens = decoder(tokenizer, encoder_decoder=encoder_decoder, special=special)
    expected = whole(backend, family, ids, encoder_decoder=encoder_decoder, special=special)
    assert "".join(pieces(tokens, ids)) == expected


def test_a_character_of_several_tokens_arrives_with_the_last(families: Families) -> None:
    backend, tokenizer = families("byte_fallback")
    assert pieces(decoder(tokenizer), byte_ids(backend, "é😀".encode())) == ["", "é", "", "", "", "😀"]


def test_tokens_that_all_end_inside_a_character_do_not_delay_text(tmp_path: Path) -> None:
    head, middle = "ä½", "łä½"  # E4 BD; A0 E4 BD
    backend = Backend(models.BPE({"A": 0, head: 1, middle: 2}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.load(zoo.write(tmp_path, backend.to_str()), workers=1)
    assert pieces(decoder(tokenizer), [1, *[2] * 50, 0]) == ["", *["你"] * 50, "\ufffdA"]


@given(values=st.binary(max_size=30))
def test_invalid_bytes_are_replaced_one_by_one(families: Families, values: bytes) -> None:
    backend, tokenizer = families("byte_fallback")
    escaped = values.decode("utf-8", "surrogateescape")
    expected = "".join("\ufffd" if 0xDC80 <= ord(c) <= 0xDCFF else c for c in escaped)
    text = "".join(pieces(decoder(tokenizer), byte_ids(backend, values)))
    assert text == expected.rstrip("\ufffd")


@pytest.mark.parametrize(
    ("ends", "text"), [([], " one"), ([2], " one"), ([2, 2], " one</s>"), ([2, 13, 2], " one</s>\n")]
)
def test_one_final_eos_adds_no_text(families: Families, ends: list[int], text: str) -> None:
    backend, tokenizer = families("mistral")
    ids = [*backend.encode("one", add_special_tokens=False).ids, *ends]
    assert "".join(pieces(decoder(tokenizer, 2, special=True), ids)) == text


def test_eos_that_is_not_special_is_text(families: Families) -> None:
    backend, tokenizer = families("mistral")
    ids = backend.encode("one two", add_special_tokens=False).ids
    assert "".join(pieces(decoder(tokenizer, ids[-1]), ids)) == " one two"
    assert "".join(pieces(decoder(tokenizer, ids[-1], special=True), ids)) == " one"


@pytest.mark.parametrize(("family", "encoder_decoder"), [*((f, False) for f in zoo.FAMILIES), ("metaspace", True)])
def test_a_vocabulary_has_no_tokens_that_depend_on_the_one_before(
    families: Families, family: str, encoder_decoder: bool
) -> None:
    """Else what each adds to an output, at its beginning and later, but for special tokens, which are shown or not."""
    _, tokenizer = families(family)
    tokens = decoder(tokenizer, encoder_decoder=encoder_decoder, special=encoder_decoder)
    dependent = family in ("ctc", "word_suffix", "word_suffix_sequence")
    ids = range(0 if dependent else tokenizer.max_token_id + 1)
    shown = [not tokenizer.is_special(index) and not tokens.skips(index) for index in ids]
    first, later = ([tokens.token_bytes(before, i) if shown[i] else b"" for i in ids] for before in (None, 0))
    assert tokens.vocabulary() == Vocabulary(later, {i: first[i] for i in ids if first[i] != later[i]})


def test_unsupported_decoder(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"A": 0, "a_b": 1}))
    backend.decoder = decoders.Replace("_", " ")
    tokenizer = Tokenizer.load(zoo.write(tmp_path, backend.to_str()), workers=1)
    with pytest.raises(StartError, match="unsupported tokenizer type: decoder Replace"):
        decoder(tokenizer)
    assert pieces(decoder(tokenizer, encoder_decoder=True), [0, 1]) == ["A", "a b"]
