"""Structured output: `response_format` of OpenAI and TGI, vLLM's `structured_outputs` and `guided_...`.

`GrammarMarks` writes the marks of a model's formats around it.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tgis.api.openai.bodies import SamplingBody, StructuredOutputs
from tgis.api.openai.reasoning import ReasoningFormat, thought_state
from tgis.errors import InvalidRequest
from tgis.ipc.lookups import GrammarKind, GrammarSpec

_POSSIBLE_TOKEN = re.compile(r"(</?[|｜]?[\w▁]+[|｜]?>|\[/?[A-Z_]+\])")


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
    """TGI writes the schema or regex as `value`, llama.cpp the schema of a json_object as `schema`.

    The Responses API has name, schema and strictness beside the type.
    """
    flat = given if given.get("type") == "json_schema" and "schema" in given else given.get("schema")
    values = (given.get("value"), given.get("json_schema"), flat)
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


def _schema(schema: Any, *, exact: bool = True) -> GrammarSpec:
    """The grammar of a JSON schema, given as an object or as its JSON."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, exact=exact)


class GrammarMarks:
    """Writes marks in Lark: one that is a special token is matched as such, others as text."""

    def __init__(self, special_token_id: Callable[[str], int | None]) -> None:
        self._special_token_id = special_token_id

    def lark(self, text: str) -> str:
        """A text of a format."""
        parts = ((part, self._special_token_id(part)) for part in _POSSIBLE_TOKEN.split(text) if part)
        return " ".join(json.dumps(part) if id_ is None else f"<[{id_}]>" for part, id_ in parts)

    def until(self, name: str, mark: str, *others: str, any_text: str = "/(?s:.*)/") -> Iterator[str]:
        """Two rules: a terminal of text without these marks, with the name in capitals, and the text with the mark."""
        marks = "|".join(re.escape(other.strip()).replace("/", r"\/") for other in (mark, *others) if other)
        yield f"{name.upper()}: {any_text} & ~/(?s:.*)({marks})(?s:.*)/"
        end, lazy = self.lark(mark), "[lazy]"
        if "<[" in end:  # such a rule must not be lazy, so the text takes all white space before the special token
            end, lazy = self.lark(mark.lstrip()), ""
        yield f"{name}_and_mark{lazy}: {name.upper()} {end}"

    def after_thought(self, form: ReasoningFormat, prompt: str, *, marks_answer: bool) -> str:
        """Rules that have a thought before the rule `answer`; empty if the prompt has the answer begin at once."""
        if (state := thought_state(form, prompt)) is False:
            return ""
        thought = f"thought_and_mark {self.lark(form.next_message)} GAP?"
        start = thought if state else f"({self.lark(form.begin)} {thought})?"
        answer = f"{self.lark(form.answer) if marks_answer else ''} answer"
        return "\n".join([*self.until("thought", form.end), r"GAP: /\s{1,4}/", f"start: {start} {answer}"])
