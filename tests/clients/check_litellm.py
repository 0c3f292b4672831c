"""litellm, as the route of a gateway, against the server at SERVER_URL, whose engine repeats the last message."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub

import litellm  # type: ignore[import-not-found]
import pytest

URL = f"{os.environ['SERVER_URL']}/v1"
ROUTES = ["openai/any", "hosted_vllm/any", "litellm_proxy/any"]


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


def test_errors_are_those_that_a_gateway_acts_on() -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asking("a " * 2000))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asking("a", temperature=-1))
    with pytest.raises(litellm.InternalServerError):
        litellm.completion(**asking("a!"))
