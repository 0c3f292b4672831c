"""Tokenizers that come from the headers of GGUF files: the ids of the original ones, and the ends of llama.cpp."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizer_families
from chat_templates import load_template
from real_tokenizers import BYTE, CONTROL, NORMAL, directory, write_header, write_tokenizer
from tables import read_table, table
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from tgis.errors import StartError
from tgis.frontend.tokenizer import Tokenizer as OurTokenizer
from tgis.models.convert import gguf
from tgis.models.convert.gguf_tokenizer import _pre_tokenizer, end_ids
from tgis.models.files import eos_token_ids, find_model

PAGE = """English: The quick brown fox doesn't jump; it'S over 1234567 lazy dogs — 3.14159, isn't it?  Two  spaces.
Deutsch: Größe, Straße, naïve café, cafe\u0301 n\u0303 a\u0308\u0323.  Tiếng Việt: nhiều việc hợp.
Русский: Быстрая бурая лиса прыгает через 42 ленивых собак.  Ελληνικά: Η γρήγορη αλεπού ά\u0301
العربية: مرحبا بالعالم، كيف حالك؟ ١٢٣  עברית: שלום עולם, שָׁלוֹם
हिन्दी: नमस्ते दुनिया, क्षि १२३।  ไทย: สวัสดีชาวโลก
中文：你好，世界。一二三  日本語：こんにちは世界。カタカナ か\u3099
한국어: 안녕하세요 \u1112\u1161\u11ab\u1100\u1173\u11af
emoji: 👨‍👩‍👧‍👦 👩🏽‍🚒 🇩🇪🇫🇷 ½ ① ﬁ
code:\r\n    def f(x):\n\t\treturn x  # comment\n\n\n  </s> <s>strike</s> `x`  \n   """
FAMILIES: dict[str, Any] = tokenizer_families.TABLE["gguf"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_original(family: str, cache_dir: Path, tmp_path: Path) -> None:
    small = family in tokenizer_families.REAL
    text = tokenizer_families.description(family, cache_dir) if small else ""
    expected = Tokenizer.from_str(text or (directory(family, cache_dir) / "tokenizer.json").read_text())
    write_tokenizer(tmp_path / "model.gguf", expected, **FAMILIES[family]["fields"])
    gguf.convert_here(tmp_path)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    added = [token.content for token in expected.get_added_tokens_decoder().values()][:40]
    chat = "".join(f"{text}user\nHi there!{text}" for text in added)
    for text in (PAGE, chat, PAGE + chat, ""):
        ids = expected.encode(text).ids
        assert made.encode(text).ids == ids
        assert made.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
    assert made.get_vocab_size() == expected.get_vocab_size()
    ends = FAMILIES[family]["ends"]
    assert {made.id_to_token(index) for index in eos_token_ids(find_model(str(tmp_path), None, None))} == {*ends}


BYTES = sorted(ByteLevel.alphabet())


def header(*more: tuple[str, int], **fields: Any) -> dict[str, Any]:
    """A byte-level tokenizer with two merges, one token that they do not make, and more with their types."""
    tokens = ["<s>", *BYTES, "he", "ll", "hell", *(text for text, _ in more)]
    types = [CONTROL] + [NORMAL] * (len(BYTES) + 3) + [type_ for _, type_ in more]
    common = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": ["h e", "l l"]}
    return common | {"bos_token_id": 0} | fields


def made(path: Path, **fields: Any) -> tuple[OurTokenizer, set[str]]:
    """The tokenizer, and the texts of the ends."""
    write_header(path / "model.gguf", **fields)
    gguf.convert_here(path)
    tokenizer = OurTokenizer.load(path, workers=1)
    tokenizer.close()
    return tokenizer, {tokenizer.token_text(index) for index in eos_token_ids(find_model(str(path), None, None))}


@table("models", "gguf fields of pre-tokenizers")
def test_pre_tokenizers_that_say_more(row: dict[str, Any], tmp_path: Path) -> None:
    fields, tokens = row["fields"], row["tokens"]
    text = "hell" if "hell" in tokens else "hello"
    tokenizer, _ = made(tmp_path, **header(**fields))
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (backend.normalizer is not None) == (fields["pre"] == "qwen2")  # which composes characters
    found = backend.encode(text).tokens
    assert found == [token for token in tokens if token != "o" or text == "hello"]
    assert tokenizer.bos_token_id == (0 if tokens[0] == "<s>" else None)


def test_the_names_of_llama_cpp() -> None:
    for text in itertools.chain(*read_table("models", "gguf ends")):
        assert end_ids({"tokens": ["a", text], "token_type": [CONTROL] * 2}) == [1], text
    for pieces, names in read_table("models", "gguf pre-tokenizers").items():
        for name in names:
            assert [piece for piece, _ in _pre_tokenizer(name).pre_tokenize_str("12")] == pieces.split(), name


@table("models", "gguf ends in a header")
def test_ends_are_those_of_llama_cpp(row: dict[str, Any], tmp_path: Path) -> None:
    tokens, ends = row["tokens"], {*row["ends"]}
    tokenizer, found = made(tmp_path, **header(*tokens.items()))
    assert found == ends
    for index, (text, type_) in enumerate(tokens.items(), len(BYTES) + 4):
        assert (tokenizer.encode_without_special_tokens(f"a{text}")[1:] == [index]) == (type_ != NORMAL)
        assert tokenizer.is_special(index) == (type_ == CONTROL or text in ends)


def test_control_tokens_of_phi3_take_the_space_after_them(tmp_path: Path) -> None:
    """As in its tokenizer.json, and in llama.cpp."""
    tokens = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, "<0x0A>": BYTE, "▁": NORMAL, "a": NORMAL, "<|end|>": CONTROL}
    fields = {"model": "llama", "tokens": [*tokens], "token_type": [*tokens.values()], "scores": [0.0] * len(tokens)}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": False}
    tokenizer, ends = made(tmp_path, architecture="phi3", **fields, **ids)
    assert tokenizer.encode_without_special_tokens("a<|end|>\n a<s>\n") == [5, 6, 5, 1, 3]
    assert (ends, tokenizer.bos_token_id) == ({"</s>", "<|end|>"}, 1)  # which texts begin with if nothing is said


def test_the_header_names_ends(tmp_path: Path) -> None:
    more = ("<end>", CONTROL), ("<turn>", CONTROL), ("<message>", CONTROL)
    first = len(BYTES) + 4
    ids = {"eos_token_id": first, "eot_token_id": first + 1, "eom_token_id": first + 2, "fim_pad_token_id": 9999}
    _, ends = made(tmp_path, **header(*more, **ids))
    assert ends == {"<end>", "<turn>", "<message>"}


def test_all_templates_are_kept(tmp_path: Path) -> None:
    """Unless files next to it have some; these are never written to."""
    templates = {"chat_template": "plain", "chat_template.tool_use": "tools", "chat_template.rag": "rag"}
    made(tmp_path, **header(**templates, eos_token_id=0))
    template = load_template(tmp_path)
    user = [{"role": "user", "content": "a"}]
    assert [template.render(user), template.render(user, [{}]), template.mentions("rag")] == ["plain", "tools", True]
    beside = tmp_path / "beside.json"
    beside.write_text(json.dumps({"chat_template": "mine", "model_max_length": 7}))
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").symlink_to(beside)
    (tmp_path / "tokenizer.json").unlink()
    gguf.convert_here(tmp_path)
    template = load_template(tmp_path)
    assert template.render(user) == "mine"
    assert json.loads(beside.read_text()) == {"chat_template": "mine", "model_max_length": 7}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"merges": None}, "its header has no tokenizer.ggml.merges: put tokenizer.json next to the file"),
        ({"tokens": None}, "its header has no tokenizer.ggml.tokens: put tokenizer.json next to the file"),
        ({"model": "llama"}, "its header has no tokenizer.ggml.scores: put tokenizer.json next to the file"),
        ({"merges": ["he"]}, "its tokenizer cannot be read, put tokenizer.json next to the file: "),
        ({"bos_token_id": 9999}, "its tokenizer cannot be read, put tokenizer.json next to the file: IndexError"),
    ],
)
def test_a_header_that_leaves_something_out_is_one_line(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {name: value for name, value in (header() | fields).items() if value is not None}
    with pytest.raises(StartError) as caught:
        made(tmp_path, **given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
