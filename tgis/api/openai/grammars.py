"""Structured output: `response_format` of OpenAI and TGI, vLLM's `structured_outputs` and `guided_...`."""

from typing import Any

import msgspec

from tgis.api.openai.bodies import SamplingBody, StructuredOutputs
from tgis.errors import InvalidRequest
from tgis.ipc.lookups import GrammarKind, GrammarSpec


def grammar(body: SamplingBody) -> GrammarSpec | None:
    """The grammar of the output; None if there is none."""
    guided = StructuredOutputs(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    absent = (None, StructuredOutputs())
    given = [_only_constraint(outputs) for outputs in (body.structured_outputs, guided) if outputs not in absent]
    if body.response_format is not None and (spec := _response_format(body.response_format)):
        given.append(spec)
    if len(given) > 1:
        text = "response_format, structured_outputs and guided_... are mutually exclusive"
        raise InvalidRequest("structured_outputs", text)
    return given[0] if given else None


def _response_format(given: dict[str, Any]) -> GrammarSpec | None:
    """TGI writes the schema or regex as `value`, llama.cpp the schema of a json_object as `schema`."""
    values = (given.get(name) for name in ("value", "json_schema", "schema"))
    value = next((value for value in values if value is not None), None)
    strict = isinstance(value, dict) and value.get("strict") is True
    return format_grammar("response_format", given.get("type"), value, exact=strict)


def format_grammar(field: str, kind: Any, value: Any, *, exact: bool = True) -> GrammarSpec | None:
    """The grammar of an output format; None for text."""
    match kind, value:
        case "text", _:
            return None
        case "json_object" | "json", None:
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case ("json_object" | "json", schema) | ("json_schema", {"schema": schema}):
            return _schema(schema, exact=exact)
        case "json_schema", _:
            raise InvalidRequest(field, f"{field}.json_schema must have a schema")
        case "regex", str():
            return GrammarSpec(GrammarKind.REGEX, value)
        case "regex", _:
            raise InvalidRequest(field, f"{field}.regex must be a text")
    raise InvalidRequest(field, f"{field} must have type text, json_object or json_schema", str(kind)[:40])


def _only_constraint(given: StructuredOutputs) -> GrammarSpec:
    constraints = {name: value for name, value in msgspec.structs.asdict(given).items() if value not in (None, False)}
    if len(constraints) != 1:
        text = "structured_outputs must have one of json, regex, choice, grammar and json_object"
        raise InvalidRequest("structured_outputs", text, str(len(constraints)))
    match constraints.popitem():
        case "json", schema:
            return _schema(schema)
        case "choice", choices:
            return GrammarSpec(GrammarKind.CHOICE, choices=tuple(choices))
        case "json_object", _:
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case kind, text:
            return GrammarSpec(GrammarKind(kind), text)
    raise AssertionError("unreachable")


def _schema(schema: Any, *, exact: bool = True) -> GrammarSpec:
    """The grammar of a JSON schema, given as an object or as its JSON."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, exact=exact)
