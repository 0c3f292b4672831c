"""Tokens that stand beside tokenizer.json: ids, flags and ends as AutoTokenizer has them."""

import json
import operator
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from tgis.errors import StartError
from tgis.frontend.tokenizer import Tokenizer as OurTokenizer

WORDS = ["A", "B", "C", "<in>", "<special>", "<x>", "<y>", "<z>"]  # the first four are in the model's vocabulary


def backend() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS[:4])}, unk_token="C"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_tokens([AddedToken("<in>"), AddedToken("<special>", special=True)])
    return made


def write(directory: Path, files: dict[str, Any]) -> Path:
    backend().save(str(directory / "tokenizer.json"))
    defaults = {"config": {"model_type": "gpt2"}, "tokenizer_config": {}}
    for name, content in (defaults | files).items():
        extra = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == "tokenizer_config" else {}
        (directory / f"{name}.json").write_text(json.dumps(content | extra))
    return directory


def check(directory: Path) -> None:
    """Compare ours with AutoTokenizer."""
    ours, original = OurTokenizer.load(directory, workers=1), AutoTokenizer.from_pretrained(directory)
    ours.close()
    added = original.backend_tokenizer.get_added_tokens_decoder()
    assert ours.vocab_size == len(original)
    for index in range(len(original)):
        assert ours.token_text(index) == original.convert_ids_to_tokens(index)
        assert ours.is_special(index) == (index in added and added[index].special)
    for text in ("".join(WORDS), " ".join(WORDS), "a<y> <in>B <special>"):
        assert ours.encode_without_special_tokens(text) == original.encode(text, add_special_tokens=False)
    eos = original.eos_token_id
    assert ours.eos_ids == (() if eos is None else (eos,))


words, flags = st.sampled_from(WORDS), st.booleans()
tokens = st.fixed_dictionaries(
    dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), flags) | {"content": words}
)
plain_tokens = tokens.map(lambda token: {name: flag for name, flag in token.items() if name != "special"})
typed = tokens.map(lambda token: token | {"__type": "AddedToken"})
NAMES = ["bos_token", "eos_token", "pad_token"]


def named(names: list[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Names of different texts: flags that contradict each other mean nothing."""
    texts = st.lists(values, max_size=3, unique_by=lambda value: value if isinstance(value, str) else value["content"])
    return texts.flatmap(lambda each: st.permutations(names).map(lambda order: dict(zip(order, each, strict=False))))


SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "additional_special_tokens": st.lists(words, max_size=3, unique=True),
        "added_tokens_decoder": st.dictionaries(st.integers(0, 9).map(str), tokens | plain_tokens, max_size=3),
    },
)
FILES = st.fixed_dictionaries(
    {"tokenizer_config": st.builds(operator.or_, named([*NAMES, "image_token"], words | typed), SETTINGS)},
    optional={
        "special_tokens_map": named(NAMES, words | tokens),
        "added_tokens": st.permutations(WORDS).map(lambda texts: {texts[0]: 5, texts[1]: 6}),
    },
)  # fmt: skip


@settings(max_examples=50)
@given(files=FILES)
def test_as_auto_tokenizer(files: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        check(write(Path(directory), files))


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": {"5": {"content": 7}}}},
        {"tokenizer_config": {"added_tokens_decoder": {"five": {"content": "<x>"}}}},
        {"tokenizer_config": {"added_tokens_decoder": []}},
        {"tokenizer_config": {"additional_special_tokens": 7}},
        {"added_tokens": {"<x>": "5"}},
    ],
)
def test_what_cannot_be_read_is_one_line(files: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StartError, match=f"^{tmp_path} has tokens that cannot be added to its tokenizer: ") as caught:
        OurTokenizer.load(write(tmp_path, files), workers=1)
    assert "\n" not in str(caught.value)
