"""The package openai against the server at SERVER_URL, whose engine repeats the last message: helpers that go beyond
the plain calls of tests/api/openai/test_openai_api.py.
"""

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


COUNT = '{"n": 5, "unit": "cm"}'
CALL = f'<tool_call>\n{{"name": "Count", "arguments": {COUNT}}}\n</tool_call>'
TOOL: Any = openai.pydantic_function_tool(Count)  # strict


def asking(text: str, **params: Any) -> Any:
    return {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 100} | params


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=URL, api_key="x", max_retries=0, timeout=30) as made:
        yield made


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


def test_responses(client: openai.OpenAI) -> None:
    """The helpers of the package keep the order of events."""
    asked: Any = {"model": "any", "max_output_tokens": 200}
    answer = client.responses.parse(**asked, input=COUNT, text_format=Count)
    assert answer.output_parsed == Count(n=5, unit="cm")
    with client.responses.stream(**asked, input=COUNT, text_format=Count) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert stream.get_final_response().output_parsed == Count(n=5, unit="cm")
    assert "".join(deltas) == COUNT
    tools: Any = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**asked, **tools, input=CALL) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert (call.parsed_arguments, snapshots[-1]) == (Count(n=5, unit="cm"), call.arguments)


def test_parse(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(**asking(COUNT, response_format=Count))
    assert answer.choices[0].message.parsed == Count(n=5, unit="cm")
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asking(COUNT, response_format=Count, max_tokens=5))
