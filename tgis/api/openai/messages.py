"""Converts the messages and tools of a chat to the variables of its template."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tgis.api.openai.bodies import ChatMessage, ContentPart, Tool, ToolCall
from tgis.errors import InvalidRequest


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages; templates expect null fields to be absent."""
    if not messages:
        raise InvalidRequest("messages", "messages cannot be empty")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Convert tools, without null fields; schemas may be large and are not copied."""
    return [{"type": tool.type, "function": _without_nulls(tool.function, strict=None)} for tool in tools]


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    content = _text(message.refusal if message.content is None else message.content, path)
    if content is None and not message.tool_calls:
        if message.tool_calls is None:
            raise InvalidRequest(path, f"{path} has neither content nor tool_calls")
        content = ""
    calls = [_tool_call(call) for call in message.tool_calls or ()]
    return _without_nulls(message, content=content, tool_calls=calls or None, refusal=None)


def _without_nulls(struct: msgspec.Struct, **changes: Any) -> dict[str, Any]:
    fields = msgspec.structs.asdict(struct) | changes
    return {name: value for name, value in fields.items() if value is not None}


def _text(content: str | list[ContentPart] | None, path: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            field = f"{path}.content[{index}]"
            raise InvalidRequest(field, f"{field} must have the type text and a text", part.type[:40])
    return "".join(part.text or "" for part in content)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):  # templates write them as JSON themselves
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = call.function.arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})
