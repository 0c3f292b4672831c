"""The package openai against the server at SERVER_URL, whose engine repeats the last message: helpers that go beyond
the plain calls of tests/api/test_openai.py.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

URL = f"{os.environ['SERVER_URL']}/v1"


class Count(BaseModel):
    """How many."""

    n: int
    unit: str


class Nested(BaseModel):
    counts: list[Count]
    note: str | None = None


COUNT = '{"n": 5, "unit": "cm"}'
NESTED = '{"counts":[{"n":5,"unit":"cm"},{"n":-1,"unit":""}],"note":null}'
CALL = f'<tool_call>\n{{"name": "Count", "arguments": {COUNT}}}\n</tool_call>'
TOOL: Any = openai.pydantic_function_tool(Count)  # strict


def asking(text: str, **params: Any) -> Any:
    return {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 100} | params


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=URL, api_key="x", max_retries=0, timeout=30) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asking("hello ", max_tokens=8, n=5, temperature=1.0, seed=1))
    assert [(each.index, each.message.content) for each in answer.choices] == [
        (index, "hello he") for index in range(5)
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 40)
    texts = dict.fromkeys(range(5), "")
    for chunk in client.chat.completions.create(**asking("hello ", max_tokens=8, n=5, stream=True)):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == dict.fromkeys(range(5), "hello he")


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**asking("hello</s>")) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.content == "".join(deltas) == "hello"
    assert len(deltas) > 1
    tools: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asking(CALL, **tools)) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        calls: Any = stream.get_final_completion().choices[0].message.tool_calls
    (call,) = calls
    assert call.function.parsed_arguments == Count(n=5, unit="cm")
    assert [(event.name, json.loads(event.arguments)) for event in done] == [("Count", json.loads(COUNT))]


@pytest.mark.parametrize(("kind", "text"), [(Count, COUNT), (Nested, NESTED)])
def test_parse(client: openai.OpenAI, kind: type[BaseModel], text: str) -> None:
    answer = client.chat.completions.parse(**asking(text, response_format=kind))
    assert answer.choices[0].message.parsed == kind.model_validate_json(text)
    with client.chat.completions.stream(**asking(text, response_format=kind)) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == kind.model_validate_json(text)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asking(text, response_format=kind, max_tokens=5))


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "Count"}}])
def test_tools(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.parse(**asking(CALL, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False))
    calls: Any = answer.choices[0].message.tool_calls
    (call,) = calls
    assert (call.function.name, call.function.parsed_arguments) == ("Count", Count(n=5, unit="cm"))
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "five"}
    messages: Any = [*asking(CALL)["messages"], answer.choices[0].message, result]
    answer = client.chat.completions.create(**asking("", messages=messages, tools=[TOOL], max_tokens=4))
    assert answer.choices[0].message.content == "five"


def test_completions(client: openai.OpenAI) -> None:
    asked: Any = {"model": "any", "max_tokens": 4, "echo": True, "logprobs": 2}
    answer = client.completions.create(prompt=["ab", "cd"], n=2, **asked)
    assert [choice.text for choice in answer.choices] == ["ababab", "ababab", "cdcdcd", "cdcdcd"]
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [6] * 4
    options: Any = {"include_usage": True}
    *chunks, last = client.completions.create(prompt="ab", stream=True, stream_options=options, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ababab"
    assert (last.choices, last.usage.total_tokens) == ([], 6)
    assert client.models.retrieve(client.models.list().data[0].id).object == "model"


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "a " * 2000}]}, openai.BadRequestError),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "a!"}]}, openai.InternalServerError),
    ],
)
def test_errors(client: openai.OpenAI, params: Any, error: type[openai.APIStatusError]) -> None:
    for stream in (False, True):
        with pytest.raises(error):
            list(client.chat.completions.create(**asking("a", stream=stream) | params))


def test_asyncio() -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=URL, api_key="x", max_retries=0, timeout=30) as client:
            async with client.chat.completions.stream(**asking(NESTED, response_format=Nested)) as stream:
                found = await stream.get_final_completion()
            assert found.choices[0].message.parsed == Nested.model_validate_json(NESTED)

    asyncio.run(run())
