"""What is certain about a tokenizer, from its `tokenizer.json`. Nothing is assumed of what is not known here.

A text can be cut before a single space between two ASCII letters or digits, and what is behind it tokenized alone, if
every step treats the two sides alone: no added token matches across the cut, each normalizer looks at characters or
grapheme clusters, a pre-tokenizer splits there whatever is around, and the model looks at one word at a time. Where
no pre-tokenizer splits there, no token of the vocabulary must have a space after a letter or digit.

A token stands for a bounded number of bytes if no step drops or shortens text and the model knows every byte.
"""

import re
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_SPACE = "▁"
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled", "BertNormalizer"}
_SPLIT_AT_SPACES = {"WhitespaceSplit", "Whitespace", "BertPreTokenizer"}
_LLAMA_NORMALIZERS = [
    {"type": "Prepend", "prepend": _SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
]
_REPLACES_SPACES = ({"String": " "}, {"Regex": " {2,}"})
# None of these patterns matches across a letter or digit and a space after it, or looks at what is before a match.
_SPLIT_PATTERNS = {
    *(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for digits in (r"\p{N}", r"\p{N}{1,3}")
    ),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "\\n|▁*[^▁\\n]+|▁+",
}


def dropped_at_cut(description: dict[str, Any]) -> int | None:
    """How many spaces to leave out where a text is cut, so that its end gives the last tokens of the whole.

    1 if the normalizer puts one before every text; None unless all this is certain.
    """
    added = [token["content"] for token in description.get("added_tokens") or ()]
    if any(" " in content.strip(" ") or _SPACE in content for content in added) or _strips(description, "rstrip"):
        return None
    model, normalizers = description["model"], _members(description.get("normalizer"))
    if model.get("dropout"):
        return None
    drops_space = normalizers == _LLAMA_NORMALIZERS
    if drops_space and any(content[:1].isalnum() for content in added):
        return None  # in the whole text, the space before it would be alone
    if not drops_space and not all(map(_is_local, normalizers)):
        return None
    pre_tokenizers = _members(description.get("pre_tokenizer"))
    if not all(map(_is_known, pre_tokenizers)) or (pre_tokenizers and drops_space):
        return None
    if not any(map(_splits_at_spaces, pre_tokenizers)) and not _never_joins(model, _space(normalizers, pre_tokenizers)):
        return None
    return int(drops_space)


def max_bytes_per_token(description: dict[str, Any]) -> int | None:
    """The most bytes of a text that one token stands for; None unless that is certain."""
    model, pre_tokenizers = description["model"], _members(description.get("pre_tokenizer"))
    normalizers = _members(description.get("normalizer"))
    if model["type"] != "BPE" or _strips(description, "lstrip") or _strips(description, "rstrip"):
        return None
    if any(one not in _LLAMA_NORMALIZERS for one in normalizers) or any(map(_drops_text, pre_tokenizers)):
        return None
    byte_level = any(one["type"] == "ByteLevel" for one in pre_tokenizers)
    vocabulary = _vocabulary(model)
    if not vocabulary >= (set(ByteLevel.alphabet()) if byte_level else {f"<0x{byte:02X}>" for byte in range(256)}):
        return None
    if not byte_level and not model.get("byte_fallback"):
        return None
    added = [len(token["content"].encode()) for token in description.get("added_tokens") or ()]
    return max(*added, *(len(token if byte_level else token.encode()) for token in vocabulary))


def _members(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a pipeline as a flat list, with nested sequences unpacked."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = next(value for key, value in step.items() if key != "type")
    return [member for one in inner for member in _members(one)]


def _vocabulary(model: dict[str, Any]) -> set[str]:
    vocabulary = model.get("vocab") or ()
    return {token if isinstance(token, str) else token[0] for token in vocabulary}


def _strips(description: dict[str, Any], side: str) -> bool:
    return any(token.get(side) for token in description.get("added_tokens") or ())


def _is_local(normalizer: dict[str, Any]) -> bool:
    match normalizer["type"]:
        case "Replace":
            return normalizer["pattern"] in _REPLACES_SPACES and normalizer["content"] in (" ", _SPACE)
        case "Strip":
            return not normalizer.get("strip_left", True)
        case other:
            return other in _LOCAL_NORMALIZERS


def _space(normalizers: list[dict[str, Any]], pre_tokenizers: list[dict[str, Any]]) -> str:
    """What the model sees of a space."""
    if any(one["type"] == "ByteLevel" for one in pre_tokenizers):
        return "Ġ"
    return _SPACE if any(one.get("content") == _SPACE for one in normalizers) else " "


def _never_joins(model: dict[str, Any], space: str) -> bool:
    """Whether tokens on the two sides of a space after a letter or digit never depend on each other."""
    looks_at_words = ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] not in ("BPE", "Unigram") or any(map(model.get, looks_at_words)):
        return False
    vocabulary = _vocabulary(model)
    return space in vocabulary and not any(re.search(f"[A-Za-z0-9]{space}", token) for token in vocabulary)


def _is_known(pre_tokenizer: dict[str, Any]) -> bool:
    return pre_tokenizer["type"] in ("ByteLevel", "Digits", "Punctuation") or _splits_at_spaces(pre_tokenizer)


def _splits_at_spaces(pre_tokenizer: dict[str, Any]) -> bool:
    match pre_tokenizer:
        case {"type": "ByteLevel"}:
            return bool(pre_tokenizer.get("use_regex", True))
        case {"type": "Metaspace"}:
            return pre_tokenizer.get("replacement") == _SPACE and bool(pre_tokenizer.get("split", True))
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated" | "Removed"}:
            return pattern in _SPLIT_PATTERNS and not pre_tokenizer.get("invert")
        case _:
            return pre_tokenizer["type"] in _SPLIT_AT_SPACES


def _drops_text(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") == "Removed"
    return pre_tokenizer["type"] not in ("ByteLevel", "Digits", "Metaspace")
