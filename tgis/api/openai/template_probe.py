"""Finds out how a model calls tools and thinks: from what its chat template writes for an earlier call and thought."""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from tgis.api.openai.messages import plain_messages
from tgis.api.openai.reasoning import REASONING_FORMATS, ReasoningFormat
from tgis.api.openai.template_process import TemplateError
from tgis.api.openai.tool_calls import ToolCallParser, complete_calls
from tgis.api.openai.tool_formats import TOOL_FORMATS, ToolFormat

log = logging.getLogger(__name__)

_NAME, _ARGUMENTS = "probe_tool", {"probe_key": "probe value"}
_SCHEMA = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "x"}}}
_TOOLS = [{"type": "function", "function": {"name": _NAME, "description": "x", "parameters": _SCHEMA}}]
_USER = {"role": "user", "content": "x"}
_CALL = {"type": "function", "id": "a1B2c3D4e", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_THOUGHT = {"role": "assistant", "content": "x", "reasoning_content": "x"}
_THINKING = {"enable_thinking": True, "thinking": True}


class OutputFormats(NamedTuple):
    """How a model writes calls and thoughts, as far as that is known."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def probe_template(
    render: Callable[..., str], tool_call_parser: str | None = None, reasoning_parser: str | None = None
) -> OutputFormats:
    """The formats of these names of vLLM, or those of the texts that `render` makes of messages and tools."""

    def rendered(messages: list[dict[str, Any]], *arguments: Any, add_generation_prompt: bool) -> str:
        for variant in (messages, plain_messages(messages)):
            with suppress(TemplateError):
                return render(variant, *arguments, add_generation_prompt=add_generation_prompt)
        return ""

    user = rendered([_USER], _TOOLS, add_generation_prompt=False)
    prompt = rendered([_USER], _TOOLS, add_generation_prompt=True)
    called = rendered([_USER, {"role": "assistant", "tool_calls": [_CALL]}], _TOOLS, add_generation_prompt=False)
    answers = [_rest(called, before) for before in (prompt, user)]
    forms = [form for forms in _candidates(TOOL_FORMATS, tool_call_parser) for form in forms]
    tools = _tool_format(forms, prompt, answers) or (forms[0] if tool_call_parser in TOOL_FORMATS else None)
    thought = rendered([_USER, _THOUGHT], None, add_generation_prompt=False)
    thinking = rendered([_USER], None, _THINKING, add_generation_prompt=True)
    texts = prompt + called + thought + thinking
    named = reasoning_parser in REASONING_FORMATS
    thoughts = (form for form in _candidates(REASONING_FORMATS, reasoning_parser) if named or _shows(texts, form))
    return OutputFormats(tools, next(thoughts, None))


def _candidates(formats: Mapping[str, Any], name: str | None) -> list[Any]:
    """The format of this name, else all."""
    if name is not None and name in formats:
        return [formats[name]]
    if name is not None:
        log.warning("unknown parser %s: the chat template is probed; known are %s", name, ", ".join(formats))
    return [*formats.values()]


def _rest(text: str, beginning: str) -> str:
    """What follows the common beginning of two texts."""
    length = next((at for at, pair in enumerate(zip(text, beginning, strict=False)) if pair[0] != pair[1]), None)
    return text[len(beginning) if length is None else length :]


def _tool_format(forms: Collection[ToolFormat], prompt: str, answers: Sequence[str]) -> ToolFormat | None:
    """The format of the call in an answer, else the one whose mark is in the instructions."""
    readers = [form for form in forms if any(_reads_call(form, answer) for answer in answers)]
    if readers:
        return max(readers, key=lambda form: all(part in answers[0] for part in form.call[0].split("%s")))
    return next((form for form in forms if form.start in prompt), None)


def _reads_call(form: ToolFormat, written: str) -> bool:
    parser = ToolCallParser(form, {_NAME: _SCHEMA})
    _, calls = complete_calls([*parser.add(written), *parser.finish()])
    with suppress(ValueError):
        return [(name, json.loads(arguments)) for name, arguments in calls] == [(_NAME, _ARGUMENTS)]
    return False


def _shows(texts: str, form: ReasoningFormat) -> bool:
    return any(mark in texts for mark in form.hidden[:1] or (form.begin, form.end))
