"""What an output must be: `response_format` of OpenAI and TGI, and vLLM's `structured_outputs` or `guided_...`."""

from typing import Any

import msgspec

from tgis.api.openai.bodies import SamplingBody, StructuredOutputs
from tgis.errors import InvalidRequest
from tgis.ipc.lookups import GrammarKind, GrammarSpec


def grammar(body: SamplingBody) -> GrammarSpec | None:
    """The grammar that the output must follow; None for any output."""
    guided = StructuredOutputs(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    structured = [body.structured_outputs, guided if guided != StructuredOutputs() else None]
    specs = [_response_format(body.response_format), *map(_structured, structured)]
    found = [spec for spec in specs if spec]
    if len(found) > 1:
        text = "response_format, structured_outputs and guided_... are mutually exclusive"
        raise InvalidRequest("structured_outputs", text)
    return found[0] if found else None


def _response_format(given: dict[str, Any] | None) -> GrammarSpec | None:
    """TGI has the schema, or the regex, under the name `value`, llama.cpp that of a json_object under `schema`."""
    given = {"type": "text"} if given is None else given
    kind = given.get("type")
    names = ("value", "json_schema", "schema")
    value = next((given[name] for name in names if given.get(name) is not None), None)
    match kind:
        case "text":
            return None
        case "json_object" | "json" if value is None:
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case "json_object" | "json":
            return _schema(value)
        case "json_schema" if isinstance(value, dict) and "schema" in value:
            return _schema(value["schema"])
        case "json_schema":
            raise InvalidRequest("response_format", "response_format.json_schema must have a schema")
        case "regex" if isinstance(value, str):
            return GrammarSpec(GrammarKind.REGEX, value)
    shown = "nothing" if kind is None else str(kind)[:40]
    raise InvalidRequest("response_format", "response_format must have type text, json_object or json_schema", shown)


def _structured(given: StructuredOutputs | None) -> GrammarSpec | None:
    if given is None:
        return None
    found = []
    if given.json is not None:
        found.append(_schema(given.json))
    if given.regex is not None:
        found.append(GrammarSpec(GrammarKind.REGEX, given.regex))
    if given.choice is not None:
        found.append(GrammarSpec(GrammarKind.CHOICE, choices=tuple(given.choice)))
    if given.grammar is not None:
        found.append(GrammarSpec(GrammarKind.GRAMMAR, given.grammar))
    if given.json_object:
        found.append(GrammarSpec(GrammarKind.JSON_OBJECT))
    if len(found) != 1:
        text = "structured_outputs must have one of json, regex, choice, grammar and json_object"
        raise InvalidRequest("structured_outputs", text, str(len(found)))
    return found[0]


def _schema(schema: Any) -> GrammarSpec:
    """An object, or its JSON."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text)
