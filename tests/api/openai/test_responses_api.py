"""The Responses API: its requests as chats, and its events, which are as the package openai describes them."""

from itertools import groupby
from typing import Any

import msgspec
from harness import run_async
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted_api import ask, output
from tables import table

from tgis.api.openai.bodies import ChatCompletionRequest
from tgis.api.openai.reasoning import THINK
from tgis.api.openai.responses import ResponsesRequest, chat_body
from tgis.errors import EngineFailure, Overloaded

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": "w", "parameters": {}, "strict": False}]
BODY = {"input": "x", "tools": TOOLS, "metadata": {"a": "b"}, "include": ["message.output_text.logprobs"]}
TEXT_EVENTS = "output_item.added content_part.added {0}.delta {0}.done content_part.done output_item.done"
CALL_EVENTS = "output_item.added {0}.delta {0}.done output_item.done"
ITEM_EVENTS = {
    "message": TEXT_EVENTS.format("output_text"),
    "reasoning": TEXT_EVENTS.format("reasoning_text"),
    "function_call": CALL_EVENTS.format("function_call_arguments"),
}


@table("responses", "chats")
def test_requests_are_chats(row: dict[str, Any]) -> None:
    defaults = {"stream_options": {"include_usage": True}, "tools": [], "logprobs": False}
    expected = msgspec.convert(defaults | row["chat"], ChatCompletionRequest)
    assert chat_body(msgspec.convert(row["body"], ResponsesRequest)) == expected


def shown(item: Any) -> list[str]:
    if item.type == "function_call":
        return [item.type, item.name, item.arguments]
    return [item.type, "".join(part.text for part in item.content)]


def grown(events: list[Any]) -> list[list[str]]:
    """The items as a client sees them grow."""
    items = list[list[str]]()
    for event in events:
        if event.type == "response.output_item.added":
            items.append(shown(event.item))
        elif event.type.endswith(".delta"):
            items[-1][-1] += event.delta
        indexed = getattr(event, "output_index", len(items) - 1), getattr(event, "delta", "some")
        assert (indexed[0], bool(indexed[1])) == (len(items) - 1, True)
    return items


@table("responses", "streams")
@run_async
async def test_answers_and_their_events(row: dict[str, Any]) -> None:
    reason, items, texts = row.get("stop_reason", "EOS_TOKEN"), row["items"], row["texts"]
    end = "completed" if reason == "EOS_TOKEN" else "incomplete"
    parts = [output(text, tokens=[("t",)], generated_token_count=at) for at, text in enumerate(texts, 1)]
    parts[0].input_token_count, parts[0].num_cached_tokens = 5, 3
    parts.append(output(reason=reason, generated_token_count=len(texts)))
    thinks = THINK if "reasoning" in dict(item[:2] for item in items) else None
    answer = await ask("/v1/responses", BODY | {"stream": True}, *parts, reasoning=thinks)
    events = [EVENTS.validate_python(event) for event in answer.body]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    types = " ".join(["created in_progress", *(ITEM_EVENTS[kind] for kind, *_ in items), end]).split()
    assert [kind.removeprefix("response.") for kind, _ in groupby(event.type for event in events)] == types
    streamed = events[-1].response
    assert [shown(item) for item in streamed.output] == grown(events) == items
    assert [event.item for event in events if event.type == "response.output_item.done"] == streamed.output
    begun = [event.item.status for event in events if event.type == "response.output_item.added"]
    assert begun == ["in_progress"] * len(items)
    one = {"generated_token_count": len(texts), "input_token_count": 5, "num_cached_tokens": 3}
    made = output("".join(texts), reason, [("t",)] * len(texts), **one)
    unary = (await ask("/v1/responses", BODY, made, reasoning=thinks)).body
    response: Any = Response.model_validate(unary)
    assert (unary["store"], unary["id"][:5], unary["created_at"] > 1.7e9) == (False, "resp_", True)
    for answered in (response, streamed):
        assert [shown(item) for item in answered.output] == items
        assert [item.status for item in answered.output] == ["completed"] * len(items[1:]) + [end] * len(items[:1])
        assert (answered.status, answered.error, answered.metadata) == (end, None, {"a": "b"})
        assert (answered.incomplete_details is None) == (end == "completed")
        thought = min(len(texts), sum(len(text) for kind, text, *_ in items if kind == "reasoning"))
        counts: dict[str, Any] = {"input_tokens": 5, "output_tokens": len(texts), "total_tokens": 5 + len(texts)}
        counts["input_tokens_details"] = {"cached_tokens": 3, "cache_write_tokens": 0}
        assert answered.usage.to_dict() == counts | {"output_tokens_details": {"reasoning_tokens": thought}}
    if [kind for kind, *_ in items] == ["message"]:
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        contents = [answered.output[0].content[0].logprobs for answered in (response, streamed)]
        for tokens in (*contents, [token for event in deltas for token in event.logprobs]):
            assert [token.token for token in tokens] == ["t"] * len(texts)


@run_async
async def test_a_failure_ends_the_stream() -> None:
    begun = output("a", generated_token_count=1)
    body = BODY | {"stream": True, "parallel_tool_calls": False}
    answer = await ask("/v1/responses", body, begun, Overloaded("busy"))
    *_, message, failed = events = [EVENTS.validate_python(event) for event in answer.body]
    assert (answer.status, message.item.status, failed.type) == (200, "incomplete", "response.failed")
    assert (failed.response.status, failed.response.error.code) == ("failed", "rate_limit_exceeded")
    assert failed.response.output == [message.item]
    assert (len(events), failed.response.parallel_tool_calls) == (9, False)
    assert (await ask("/v1/responses", BODY | {"stream": True}, EngineFailure("boom"))).status == 500
