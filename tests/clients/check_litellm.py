"""litellm, as the route of a gateway, against the server at SERVER_URL, whose engine repeats the last message."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub

import litellm  # type: ignore[import-not-found]
import pytest
from pydantic import BaseModel

URL = f"{os.environ['SERVER_URL']}/v1"
CALL = '<tool_call>\n{"name": "count", "arguments": {"n": 5}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [{"type": "function", "function": {"name": "count", "description": "x", "parameters": PARAMETERS}}]
ROUTES = ["openai/any", "hosted_vllm/any", "litellm_proxy/any"]


class Count(BaseModel):
    n: int


def asking(text: str, model: str = ROUTES[0], **params: Any) -> dict[str, Any]:
    connection = {"api_base": URL, "api_key": "x", "num_retries": 0, "timeout": 30}
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 100, **connection} | params


@pytest.mark.parametrize("model", ROUTES)
def test_chat(model: str) -> None:
    answer = litellm.completion(**asking("hello ", model, max_tokens=8, n=5, temperature=1.0))
    assert [choice.message.content for choice in answer.choices] == ["hello he"] * 5
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 40)
    chunks = list(litellm.completion(**asking("hello ", model, max_tokens=8, stream=True)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello he"
    assert chunks[-1].choices[0].finish_reason == "length"
    chunks = list(
        litellm.completion(**asking("hi", model, max_tokens=2, stream=True, stream_options={"include_usage": True}))
    )
    assert chunks[-1].usage.total_tokens == 4


@pytest.mark.parametrize("model", ROUTES)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "count"}}])
def test_tools(model: str, choice: Any) -> None:
    asked = asking(CALL, model, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=len(CALL) + 1)
    asked["messages"][0]["content"] += "</s>"  # the end of sequence
    (found,) = litellm.completion(**asked).choices
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.message.tool_calls]
    assert (calls, found.finish_reason) == ([("count", {"n": 5})], "tool_calls")
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    (call,) = built.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("count", {"n": 5})
    result = {"role": "tool", "tool_call_id": call.id, "content": "five"}
    messages = [*asked["messages"], found.message, result]
    answer = litellm.completion(**asked | {"messages": messages, "tool_choice": "none", "max_tokens": 4})
    assert answer.choices[0].message.content == "five"


@pytest.mark.parametrize("model", ROUTES)
def test_structured_output(model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "count", "schema": PARAMETERS, "strict": True}}
    for response_format in (form, Count, {"type": "json_object"}):
        answer = litellm.completion(**asking('{"n": 5}', model, response_format=response_format, max_tokens=8))
        assert json.loads(answer.choices[0].message.content) == {"n": 5}


def test_errors_are_those_that_a_gateway_acts_on() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asking("a " * 2000))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asking("a", temperature=-1))
    with pytest.raises(litellm.InternalServerError):
        litellm.completion(**asking("a!"))
