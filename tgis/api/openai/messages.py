"""Converts the messages and tools of a chat to the variables of its template."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tgis.api.openai.bodies import ChatMessage, ContentPart, Tool, ToolCall
from tgis.errors import InvalidRequest

# Types of content parts, and the field with their text.
_THINKING = "thinking"
_TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text", "reasoning_text", "summary_text"), "text")
_TEXT_PARTS |= {"refusal": "refusal", _THINKING: "thinking"}
_ROLES = {"developer": "system"}  # OpenAI's newer name
# The only key of arguments that are no JSON object.
ARGUMENTS_KEY = "text"


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages; templates expect null fields to be absent."""
    if not messages:
        raise InvalidRequest("messages", "messages cannot be empty")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that refuses them: with a content, a single system message, which is the first, and
    user messages that follow one another as one.
    """
    merged: list[dict[str, Any]] = []
    for message in sorted(messages, key=lambda message: message["role"] != "system"):
        role, last = message["role"], merged[-1] if merged else {}
        merged.append({"content": ""} | message)
        if role in ("system", "user") and last.get("role") == role:
            merged[-2:] = [last | {"content": f"{last['content']}\n\n{merged[-1]['content']}"}]
    return merged


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Convert tools, without null fields; schemas may be large and are not copied."""
    return [{"type": tool.type, "function": _without_nulls(tool.function, strict=None)} for tool in tools]


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    content = content_text(message.refusal if message.content is None else message.content, f"{path}.content")
    parts = message.content if isinstance(message.content, list) else ()
    thoughts = message.reasoning_content or message.reasoning or "".join(part.thinking or "" for part in parts)
    if content is None and not message.tool_calls:
        if message.tool_calls is None:
            raise InvalidRequest(path, f"{path} has neither content nor tool_calls")
        content = ""
    calls = [_tool_call(call) for call in message.tool_calls or ()]
    role = _ROLES.get(message.role, message.role)
    changes = {"role": role, "content": content, "reasoning_content": thoughts or None, "tool_calls": calls or None}
    return _without_nulls(message, refusal=None, reasoning=None, **changes)


def _without_nulls(struct: msgspec.Struct, **changes: Any) -> dict[str, Any]:
    fields = msgspec.structs.asdict(struct) | changes
    return {name: value for name, value in fields.items() if value is not None}


def content_text(content: str | list[ContentPart] | None, path: str) -> str | None:
    """The text of a content; InvalidRequest names a part that has none."""
    if content is None or isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        text = getattr(part, _TEXT_PARTS.get(part.type, ""), None)
        if text is None:
            field = f"{path}[{index}]"
            raise InvalidRequest(field, f"{field} must have the type text and a text", part.type[:40])
        texts.append("" if part.type == _THINKING else text)
    return "".join(texts)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def _arguments(given: Any) -> dict[str, Any]:
    """Arguments as an object, which templates write as JSON themselves; what is none becomes its only value."""
    try:
        value = json.loads(given.strip() or "null") if isinstance(given, str) else given
    except (ValueError, RecursionError):
        value = given
    if isinstance(value, dict):
        return value
    return {} if value is None else {ARGUMENTS_KEY: given}
