"""huggingface_hub's InferenceClient against the server at SERVER_URL, whose engine repeats its prompt."""

import os
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import GenerationError, ValidationError

URL = os.environ["SERVER_URL"]
ERRORS: list[tuple[Any, type[Exception]]] = [
    ({"prompt": "a", "max_new_tokens": 10**6}, ValidationError),
    ({"prompt": "a!"}, GenerationError),
]
MESSAGES: Any = [{"role": "user", "content": "hello "}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 5, "maximum": 5}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "count", "description": "x", "parameters": SCHEMA}}]


@pytest.fixture
def client() -> InferenceClient:
    return InferenceClient(URL, timeout=30)


def test_text(client: InferenceClient) -> None:
    """Where nothing else is asked for, a whole text begins with the prompt, as on TGI's `/`."""
    assert client.text_generation("hello ", max_new_tokens=8) == "hello hello he"
    assert client.text_generation("hello ", max_new_tokens=8, return_full_text=False) == "hello he"
    assert client.text_generation("ab</s>") == "ab</s>ab"  # without any parameter: to the end of sequence
    assert "".join(client.text_generation("hello ", max_new_tokens=8, stream=True)) == "hello he"


def test_details(client: InferenceClient) -> None:
    asked: Any = {"max_new_tokens": 8, "details": True, "top_n_tokens": 2, "do_sample": True, "seed": 4}
    asked["return_full_text"] = False
    answer = client.text_generation("hello ", decoder_input_details=True, stop=["zz"], **asked)
    details = answer.details
    assert details
    assert (answer.generated_text, details.finish_reason, details.seed) == ("hello he", "length", 4)
    assert ([token.text for token in details.prefill], len(details.tokens)) == (list("hello "), 8)
    *_, last = client.text_generation("hello ", stream=True, **asked)
    assert last.details
    assert (last.generated_text, last.details.generated_tokens, last.details.seed) == ("hello he", 8, 4)


def test_chat(client: InferenceClient) -> None:
    answer = client.chat_completion(MESSAGES, max_tokens=8, logprobs=True, top_logprobs=2, n=2, temperature=1.0)
    assert [choice.message.content for choice in answer.choices] == ["hello he"] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 16)
    options: Any = {"include_usage": True}
    *chunks, last = client.chat.completions.create(MESSAGES, max_tokens=8, stream=True, stream_options=options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello he"
    assert last.usage
    assert last.usage.completion_tokens == 8


@pytest.mark.parametrize("choice", ["required", "count", {"function": {"name": "count"}}])
def test_tools(client: InferenceClient, choice: Any) -> None:
    call: Any = [{"role": "user", "content": '<tool_call>\n{"name": "count", "arguments": {"n": 5}}\n</tool_call>'}]
    params: Any = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    params["extra_body"] = {"parallel_tool_calls": False}
    (found,) = client.chat_completion(call, **params).choices
    assert found.message.tool_calls
    assert [(each.function.name, each.function.arguments) for each in found.message.tool_calls] == [
        ("count", '{"n": 5}')
    ]
    chunks = list(client.chat_completion(call, stream=True, **params))
    pieces: Any = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments or "" for piece in pieces) == '{"n": 5}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("params", "error"), ERRORS)
def test_errors(client: InferenceClient, params: dict[str, Any], error: type[Exception], stream: bool) -> None:
    with pytest.raises(error):
        list(client.text_generation(stream=stream, **params))
