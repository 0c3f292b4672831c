"""pydantic-ai against the server at SERVER_URL, whose engine repeats the last message."""

import os
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]


class Product(BaseModel):
    """The result of a multiplication."""

    n: int


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call></s>'


@pytest.mark.parametrize(
    ("output", "result"),
    [(NativeOutput(Product), '{"n": 12}'), (ToolOutput(Product), call("final_result", '{"n": 12}'))],
)
def test_tools_and_an_output_type(output: Any, result: str) -> None:
    """The tool's result is the last message, which the answer repeats."""
    provider = OpenAIProvider(base_url=f"{os.environ['SERVER_URL']}/v1", api_key="x")
    agent = Agent(OpenAIChatModel("any", provider=provider), output_type=output, model_settings={"max_tokens": 200})

    @agent.tool_plain  # type: ignore[untyped-decorator]
    def multiply(a: int, b: int) -> str:
        """Multiply two numbers."""
        assert (a, b) == (3, 4)
        return result

    assert agent.run_sync(call("multiply", '{"a": 3, "b": 4}')).output == Product(n=12)
