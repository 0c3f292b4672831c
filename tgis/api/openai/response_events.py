"""Responses: the chunks of a chat become events, and a response that grows with them."""

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from msgspec import Struct

from tgis.api.openai.bodies import ChatCompletionChunk, ChunkChoice, ErrorBody, TokenLogprob, Usage
from tgis.api.openai.responses import ResponsesRequest

Event = tuple[str, dict[str, Any]]  # name and body

# Items: the prefix of their ids, what the events of their text or arguments are named after, and fields.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "message": ("msg_", "output_text", {"role": "assistant"}),
    "reasoning": ("rs_", "reasoning_text", {"summary": []}),
    "function_call": ("fc_", "function_call_arguments", {"arguments": ""}),
}
_NO_DETAILS: dict[str, Any] = {"annotations": [], "logprobs": []}


class Response(Struct, kw_only=True):
    """An answer, with some fields of its request."""

    id: str
    created_at: int
    model: str
    output: list[dict[str, Any]]
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    metadata: dict[str, str] = {}
    object: str = "response"
    parallel_tool_calls: bool = True
    status: str = "queued"
    store: bool = False
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    usage: dict[str, int | dict[str, int]] | None = None


class ResponseStream:
    """A response that grows. Each of its items ends before the next begins."""

    def __init__(self, request: ResponsesRequest, common: Mapping[str, Any]) -> None:
        """`common` are the fields that all chunks have."""
        given = {name: getattr(request, name, None) for name in Response.__struct_fields__}
        given |= {"id": common["id"], "created_at": common["created"], "model": common["model"], "output": []}
        self._response = Response(**{name: value for name, value in given.items() if value is not None})
        self._sequence_numbers = count()
        self._item: dict[str, Any] = {}  # the last one, until it ends
        self._pieces: list[str] = []  # its text or arguments
        self._logprobs: list[TokenLogprob] = []  # the next message that ends takes them

    def whole(self, **fields: Any) -> Response:
        """The response of a single chunk with these fields."""
        *_, _last = self.events(ChatCompletionChunk(**fields))
        return self._response

    def events(self, body: ChatCompletionChunk | ErrorBody) -> Iterator[Event]:
        """The next events; those of an error or of a chunk with usage are the last."""
        response = self._response
        if response.status == "queued":
            response.status = "in_progress"
            yield self._event("created", response=response)
            yield self._event("in_progress", response=response)
        if isinstance(body, ErrorBody):
            response.error = {"code": body.error.code or "server_error", "message": body.error.message}
            yield from self._end("failed")
            return
        for choice in body.choices:
            yield from self._choice(choice)
        if body.usage:
            response.usage = _usage(body.usage)
            yield from self._end("incomplete" if response.incomplete_details else "completed")

    def _choice(self, choice: ChunkChoice) -> Iterator[Event]:
        delta, logprobs = choice.delta, choice.logprobs.content if choice.logprobs else []
        self._logprobs += logprobs
        if choice.finish_reason == "length":
            self._response.incomplete_details = {"reason": "max_output_tokens"}
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning, content_index=0)
        if delta.content:
            yield from self._add("message", delta.content, content_index=0, logprobs=logprobs)
        for call in delta.tool_calls or ():
            if call.id is not None:
                yield from self._begin("function_call", call_id=call.id, name=call.function.name)
            yield from self._add("function_call", call.function.arguments)

    def _add(self, kind: str, text: str, **fields: Any) -> Iterator[Event]:
        """Add to the last item, or to a new one if that has another kind."""
        if self._item.get("type") != kind:
            yield from self._begin(kind, content=[])
            part = {"type": _KINDS[kind][1], "text": ""} | (_NO_DETAILS if kind == "message" else {})
            yield self._item_event("content_part.added", content_index=0, part=part)
            self._item["content"].append(part)
        if text:
            self._pieces.append(text)
            yield self._item_event(f"{_KINDS[kind][1]}.delta", delta=text, **fields)

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Begin an item."""
        yield from self._end_item("completed")
        response = self._response
        prefix, _, more = _KINDS[kind]
        id_ = f"{prefix}{len(response.output)}_{response.id}"
        self._item = {"id": id_, "type": kind, "status": "in_progress", **more, **fields}
        response.output.append(self._item)
        yield self._event("output_item.added", output_index=len(response.output) - 1, item=self._item)

    def _end_item(self, status: str) -> Iterator[Event]:
        if not (item := self._item):
            return
        text, name, self._pieces = "".join(self._pieces), _KINDS[item["type"]][1], []
        if "content" not in item:
            item["arguments"] = text
            yield self._item_event(f"{name}.done", arguments=text, name=item["name"])
        for part in item.get("content", ()):
            part["text"] = text
            if "logprobs" in part:
                part["logprobs"], self._logprobs = self._logprobs, []
            fields = {field: part[field] for field in ("text", "logprobs") if field in part}
            yield self._item_event(f"{name}.done", content_index=0, **fields)
            yield self._item_event("content_part.done", content_index=0, part=part)
        item["status"], self._item = status, {}
        yield self._event("output_item.done", output_index=len(self._response.output) - 1, item=item)

    def _end(self, status: str) -> Iterator[Event]:
        """End the response."""
        yield from self._end_item("completed" if status == "completed" else "incomplete")
        self._response.status = status
        yield self._event(status, response=self._response)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item["id"], output_index=len(self._response.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        name = f"response.{kind}"
        return name, {"type": name, "sequence_number": next(self._sequence_numbers), **fields}


def _usage(usage: Usage) -> dict[str, int | dict[str, int]]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cache_write_tokens": 0, **usage.prompt_tokens_details},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": usage.completion_tokens_details or {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
