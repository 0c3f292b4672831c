"""Adds the tokens that stand beside tokenizer.json, as AutoTokenizer does."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tgis.errors import library_errors
from tgis.models.files import read_if_any, special_tokens, tokenizer_settings

# In the order in which new ones get their ids
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def add_tokens(backend: Tokenizer, directory: Path) -> None:
    """Add them with the flags that they have there; StartError if they cannot be read."""
    with library_errors(f"{directory} has tokens that cannot be added to its tokenizer"):
        settings, names = tokenizer_settings(directory), special_tokens(directory)
        extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
        named = sorted(names, key=lambda name: _NAMES.index(name) if name in _NAMES else len(_NAMES))
        values = [*(settings[name] for name in named), *(extra.values() if isinstance(extra, dict) else extra)]
        special = [_token(value) for value in values]
        present = backend.get_added_tokens_decoder()
        if (listed := settings.get("added_tokens_decoder")) is not None:
            tokens = {int(index): _token({"special": False} | value) for index, value in listed.items()}
        else:
            texts, older = {token.content for token in special}, read_if_any(directory / "added_tokens.json")
            tokens = {index: AddedToken(text, special=text in texts) for text, index in older.items()} | present
        for token in [*tokens.values(), *special]:
            token.special |= token.content in names.values()
        known = {token.content for token in [*present.values(), *tokens.values()]}
        new = [token for token in special if token.content not in known]
        backend.add_tokens([*(tokens[index] for index in sorted(tokens)), *new])


def _token(value: str | dict[str, Any]) -> AddedToken:
    fields: dict[str, Any] = {"content": value} if isinstance(value, str) else value
    return AddedToken(**{"special": True} | {name: flag for name, flag in fields.items() if name != "__type"})
