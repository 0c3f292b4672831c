"""Reads the arguments of tool calls: JSON, Python keywords, or marked texts. None stands for what cannot be read."""

import functools
import json
from collections.abc import Container
from itertools import chain
from typing import Any

import msgspec
import regex

from tgis.api.openai.tool_formats import XmlParameters

_PYTHON = regex.compile(
    r"""(?s)(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?<!\w)(?:(?P<word>True|False|None)\b|(?P<key>[A-Za-z_]\w*)\s*=)"""
)
_ESCAPES = regex.compile(r"""(?s)\\.|\"|[\x00-\x1f]""")
# What Python writes and reads as JSON, but others do not; strings, perhaps of which the end is missing, are skipped.
_NO_JSON = regex.compile(r"""(?s)(?P<text>"(?:[^"\\]|\\.)*+(?:"|\\?\Z))|-?(?:NaN|Infinity)""")
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


def json_call(text: str, names: Container[str]) -> tuple[str, str] | None:
    """Name and arguments of a JSON object; None if it calls none of these tools."""
    try:
        call = json.loads(without_constants(text))
        name = call.get("name", call.get("tool_name"))
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):  # JSON in JSON
            arguments = json.loads(without_constants(arguments or "{}"))
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict | None):
            return None
        return name, json.dumps(arguments or {}, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def without_constants(text: str) -> str:
    """JSON with null for NaN and infinities."""
    return _NO_JSON.sub(lambda match: match["text"] or "null", text)


def python_arguments(text: str) -> str | None:
    """The keyword arguments of a call, up to its closing bracket, as JSON; values may also be written as in JSON."""
    try:
        arguments = json.loads(without_constants("{" + _PYTHON.sub(_python_to_json, text[:-1]) + "}"))
        return json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _python_to_json(token: "regex.Match[str]") -> str:
    if token["text"]:
        return '"' + _ESCAPES.sub(_json_escape, token["text"][1:-1]) + '"'
    return f'"{token["key"]}":' if token["key"] else _JSON_WORDS[token["word"]]


def _json_escape(match: "regex.Match[str]") -> str:
    text = match[0]
    if text == "\\'":
        return "'"
    return text if text[0] == "\\" else json.dumps(text)[1:-1]


def xml_arguments(layout: XmlParameters, text: str, schema: Any) -> str | None:
    """The arguments in marked texts, as JSON."""
    before, after = _compiled(layout)
    properties, arguments, at = _part(schema, "properties"), dict[str, Any](), 0
    while parameter := before.search(text, at):
        if (end := after.search(text, parameter.end())) is None:
            return None
        key, value, at = parameter["key"].strip(), text[parameter.end() : end.start()], end.end()
        arguments[key] = _typed(value, _part(properties, key))
    try:
        return json.dumps(arguments)
    except RecursionError:
        return None


@functools.cache
def _compiled(layout: XmlParameters) -> "tuple[regex.Pattern[str], regex.Pattern[str]]":
    return regex.compile(layout.before), regex.compile(layout.after)


def _part(schema: Any, key: str) -> dict[str, Any]:
    part = schema.get(key) if isinstance(schema, dict) else None
    return part if isinstance(part, dict) else {}


def _typed(text: str, schema: dict[str, Any]) -> Any:
    """The value of a text: itself if the schema allows texts, else JSON or a word of Python if it is that."""
    word = text.strip()
    types = schema_types(schema)
    if "string" in types:
        return None if "null" in types and word in ("null", "None") else text
    try:
        return msgspec.json.decode(_JSON_WORDS.get(word, word))
    except (msgspec.DecodeError, RecursionError):
        return text


def schema_types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema and its alternatives name."""
    options = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    given = [part.get("type") for part in chain([schema], *options) if isinstance(part, dict)]
    return {name for kind in given for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
