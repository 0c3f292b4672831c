"""langchain-openai against the server at SERVER_URL, whose engine repeats the last message."""

import os
from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError  # type: ignore[import-not-found]
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAI  # type: ignore[import-not-found]
from openai import BadRequestError

URL = f"{os.environ['SERVER_URL']}/v1"
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@tool  # type: ignore[untyped-decorator]
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def chat(**params: Any) -> ChatOpenAI:
    return ChatOpenAI(
        **{"base_url": URL, "api_key": "x", "model": "any", "max_tokens": 200, "max_retries": 0, "timeout": 30} | params
    )


def test_invoke_and_stream() -> None:
    model = chat(max_tokens=8, logprobs=True)
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage("hello ")])
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("hello he", "length")
    assert answer.usage_metadata["output_tokens"] == 8
    assert len(answer.response_metadata["logprobs"]["content"]) == 8
    chunks = list(model.stream("hello ", stream_usage=True))
    assert sum(bool(chunk.content) for chunk in chunks) > 1
    whole = reduce(add, chunks)
    assert (whole.content, whole.usage_metadata["total_tokens"]) == ("hello he", 14)
    many = chat(max_tokens=2, n=5, temperature=1).generate([[HumanMessage("ab")]])
    assert [each.text for each in many.generations[0]] == ["ab"] * 5


def test_batches() -> None:
    texts = [f"hello {number}</s>" for number in range(20)]
    assert [answer.content for answer in chat().batch(texts)] == [text.removesuffix("</s>") for text in texts]
    completions = OpenAI(base_url=URL, api_key="x", model="any", max_tokens=2, batch_size=20, max_retries=0)
    assert [found[0].text for found in completions.generate(["ab"] * 20).generations] == ["ab"] * 20


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"tool_choice": "any"}, {"tool_choice": "multiply"}])
def test_tools(options: dict[str, Any]) -> None:
    model = chat().bind_tools([multiply], parallel_tool_calls=False, **options)
    answer = model.invoke(CALL)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"], answer.invalid_tool_calls) == ("multiply", {"a": 3, "b": 4}, [])
    whole = reduce(add, model.stream(CALL))
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [("multiply", {"a": 3, "b": 4})]
    result = multiply.invoke(call)
    assert isinstance(result, ToolMessage)
    if "tool_choice" not in options:
        assert model.bind(max_tokens=2).invoke([HumanMessage(CALL), answer, result]).content == "12"


def test_errors() -> None:
    with pytest.raises(BadRequestError, match="temperature"):
        chat(temperature=-1).invoke("a")
    with pytest.raises(ContextOverflowError):
        chat(max_tokens=8).invoke("a " * 2000)
