"""Requests of the Responses API, without stored responses: each becomes a chat."""

from typing import Any, Literal

import msgspec

from tgis.api.openai.bodies import ChatCompletionRequest, ChatOptions, ContentPart, Limit
from tgis.api.openai.messages import content_text
from tgis.errors import InvalidRequest

_STATELESS = "nothing is stored, send the items of earlier turns in input"
# Fields that may be null or have one value: the value, what errors say of it, and what to use instead.
_BOUNDS: dict[str, tuple[Any, str]] = {
    "background": (False, "false: the answer comes with the call"),
    "conversation": (None, f"null: {_STATELESS}"),
    "n": (1, "1: a response has one output"),
    "previous_response_id": (None, f"null: {_STATELESS}"),
    "prompt": (None, "null: no prompts are stored, use instructions and input"),
    "prompt_logprobs": (None, "null: responses have none, use /v1/completions"),
    "store": (False, f"false: {_STATELESS}"),
}
# Types of input items, and a field that each must have.
_ITEMS = {"message": "content", "reasoning": "", "function_call": "name", "function_call_output": "output"}


class InputItem(msgspec.Struct):
    """A message, a function call, the output of one, or a thought: the fields of all."""

    type: str = "message"
    arguments: str | None = None
    call_id: str | None = None
    content: str | list[ContentPart] | None = None
    name: str | None = None
    output: str | list[ContentPart] | None = None
    role: str | None = None
    summary: list[ContentPart] | None = None


class ResponsesRequest(ChatOptions, kw_only=True):
    """Includes fields that must be null or have one value."""

    input: str | list[InputItem]
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: keep the last tokens of the prompt


def chat_body(body: ResponsesRequest) -> ChatCompletionRequest:
    """The chat of a request; InvalidRequest names what this server lacks. This takes long for long inputs."""
    for name, (allowed, bound) in _BOUNDS.items():
        if (value := getattr(body, name)) not in (None, allowed):
            raise InvalidRequest(name, f"{name} must be {bound}", str(value)[:40])
    changes = {
        "messages": _messages(body),
        "logprobs": "message.output_text.logprobs" in (body.include or ()),
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": (body.reasoning or {}).get("effort"),
        "response_format": (body.text or {}).get("format") or body.response_format,
        "stream_options": {"include_usage": True},
        "tool_choice": _tool(body.tool_choice, "tool_choice"),
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())],
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else body.truncate_prompt_tokens,
    }
    shared = {name: getattr(body, name) for name in ChatOptions.__struct_fields__}
    try:
        return msgspec.convert(shared | changes, ChatCompletionRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest("", str(error)) from None


def _tool(given: str | dict[str, Any] | None, path: str) -> Any:
    """A tool of a chat; words of choices stay."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        text = f"{path}.type must be function: this server runs no tools"
        raise InvalidRequest(f"{path}.type", text, str(given.get("type"))[:40])
    return {"function": given}


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: InputItem, path: str) -> None:
    """Add an item to messages; a thought, a text and calls of the assistant become one message."""
    if (kind := item.type) not in _ITEMS:
        text = f"{path}.type must be one of {', '.join(_ITEMS)}: nothing is stored, and this server runs no tools"
        raise InvalidRequest(f"{path}.type", text, kind[:40])
    if (name := _ITEMS[kind]) and getattr(item, name) is None:
        raise InvalidRequest(f"{path}.{name}", f"{path}.{name} is missing")
    if kind == "function_call_output":
        output = content_text(item.output, f"{path}.output")
        messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id, "name": item.name})
        return
    content = content_text(item.content or item.summary, f"{path}.content")
    if kind == "message" and item.role != "assistant":
        messages.append({"role": item.role, "content": content})
        return
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or kind == "reasoning" or (kind == "message" and last["content"]):
        last = {"role": "assistant", "content": None, "tool_calls": []}
        messages.append(last)
    if kind == "function_call":
        last["tool_calls"].append({"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}})
    else:
        last["reasoning_content" if kind == "reasoning" else "content"] = content
