"""openai-agents against the server at SERVER_URL, whose engine repeats the last message; three turns of an agent."""

import asyncio
import os
from typing import Any

import pytest
from agents import (  # type: ignore[import-not-found]
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": %d, "b": 4}}\n</tool_call></s>'


class Product(BaseModel):
    """The result of a multiplication."""

    n: int


@function_tool  # type: ignore[untyped-decorator]
def multiply(a: int, b: int) -> str:
    """Multiply two numbers; the first result is the next call."""
    return Product(n=a * b).model_dump_json() if a > 3 else CALL % (a * b)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("is_default", [False, True])
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_tools_and_an_output_type(tool_choice: str, is_default: bool, streamed: bool) -> None:
    """The tool's result is the last message, which the answer repeats."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{os.environ['SERVER_URL']}/v1", api_key="x", max_retries=0, timeout=30)
    set_default_openai_client(client)  # of the default model class, which sends responses
    settings = ModelSettings(tool_choice=tool_choice, max_tokens=200)  # the choice is auto after a call
    agent = Agent(
        name="calculator",
        instructions="Multiply.",
        model="any" if is_default else OpenAIChatCompletionsModel("any", client),
        tools=[multiply],
        output_type=Product,
        model_settings=settings,
    )

    async def run() -> Any:
        if not streamed:
            return (await Runner.run(agent, CALL % 3)).final_output
        result = Runner.run_streamed(agent, CALL % 3)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert asyncio.run(run()) == Product(n=48)
