"""OpenAI's API end to end: a server process with the fake engine, which repeats its prompt, and OpenAI's client."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
import openai
import pytest
from chat_templates import LAST_MESSAGE
from harness import Server, running_fake, running_server, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from tokenizers import Tokenizer

from benchmarks.soak.reconcile import parse_metrics
from demo.fake_model import make_fake_model
from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from tgis.api.tgi.schema import GenerateParameters, GenerateRequest
from tgis.pb import generation_pb2 as pb

MAX_LENGTH, MAX_NEW = 200, 169
NAME = "served"
PARIS = {"city": "Paris"}
TOOL_OUTPUT = f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("openai")
    steps = {"max_sequence_length": MAX_LENGTH, "step_seconds": 0.002, "poison_token": 0}
    adapter = directory / "store" / "tuned" / "one"
    adapter.mkdir(parents=True)
    (adapter / "decoder.pt").touch()
    options: dict[str, Any] = {"SERVED_MODEL_NAME": NAME, "PREFIX_STORE_PATH": directory / "store"}
    options |= {"MAX_NEW_TOKENS": MAX_NEW, "MAX_BEST_OF": 4}
    with running_fake(directory, steps, LAST_MESSAGE, **options) as running:
        yield running


def connected(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://localhost:{server.http_port}/v1", api_key="x", max_retries=0, timeout=50)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with connected(server) as made:
        yield made


def chat(client: openai.OpenAI, content: str, **params: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(**{"model": NAME, "messages": messages, "max_tokens": 20} | params)


def streamed(client: openai.OpenAI, content: str, **params: Any) -> list[ChatCompletionChunk]:
    return list(chat(client, content, stream=True, **params))


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = chat(client, "hello ")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hello hello hello he")
    assert (choice.finish_reason, choice.logprobs, choice.message.tool_calls) == ("length", None, None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 20, 26)
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    assert answer.id.startswith("chatcmpl-")


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    chunks = streamed(client, "hällo ", stream_options={"include_usage": True})
    whole = chat(client, "hällo ")
    assert text_of(chunks) == whole.choices[0].message.content
    *rest, last = chunks
    assert (last.choices, last.usage) == ([], whole.usage)
    assert [chunk.usage for chunk in rest] == [None] * len(rest)
    assert [chunk.choices[0].delta.role for chunk in rest] == ["assistant"] + [None] * (len(rest) - 1)
    assert [chunk.choices[0].finish_reason for chunk in rest] == [None] * (len(rest) - 1) + ["length"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(client, "abc", max_tokens=3, stream_options=options, logprobs=True)  # so a chunk for each token
    assert [chunk.usage and chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3]


def test_without_stream_options_every_chunk_has_a_choice(server: Server, client: openai.OpenAI) -> None:
    assert all(len(chunk.choices) == 1 for chunk in streamed(client, "abc"))
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1, "stream": True}
    url = f"http://localhost:{server.http_port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        *events, done, end = answer.read().split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert [json.loads(event.removeprefix(b"data: "))["choices"] for event in events] == [
        [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "logprobs": None, "finish_reason": "length"}],
    ]


@pytest.mark.parametrize(("stop", "kept"), [("wo", False), (["xx", "wo"], True)])
def test_a_stop_string_is_cut(client: openai.OpenAI, stop: Any, kept: bool) -> None:
    params = {"stop": stop, "extra_body": {"include_stop_str_in_output": kept}}
    (choice,) = chat(client, "one two ", **params).choices
    assert (choice.message.content, choice.finish_reason) == ("one two "[:5] + "wo" * kept, "stop")
    chunks = streamed(client, "one two ", **params)
    assert text_of(chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


X_IS_1 = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": X_IS_1}}}, {"x": 1}),
        ({"response_format": {"type": "json_object", "schema": X_IS_1}}, {"x": 1}),
        ({"response_format": {"type": "json", "value": X_IS_1}}, {"x": 1}),
        ({"response_format": {"type": "json_schema", "value": {"schema": X_IS_1}}}, {"x": 1}),
        ({"response_format": {"type": "json_object", "value": json.dumps(X_IS_1)}}, {"x": 1}),
        ({"extra_body": {"structured_outputs": {"json": X_IS_1}}}, {"x": 1}),
        ({"extra_body": {"guided_json": X_IS_1}}, {"x": 1}),
        ({"extra_body": {"guided_json": json.dumps(X_IS_1)}}, {"x": 1}),
        ({"extra_body": {"guided_regex": "[4-6]{3}"}}, 444),
        ({"extra_body": {"structured_outputs": {"regex": "[4-6]{3}"}}}, 444),
        ({"extra_body": {"structured_outputs": {"choice": ["17", "18"]}}}, 17),
        ({"extra_body": {"guided_choice": ["17", "18"]}}, 17),
        ({"extra_body": {"guided_grammar": 'root ::= "[" "2"{2} "]"'}}, [22]),
    ],
)
def test_an_output_follows_its_format(client: openai.OpenAI, params: dict[str, Any], expected: Any) -> None:
    (choice,) = chat(client, "{", **params).choices
    assert (json.loads(choice.message.content), choice.finish_reason) == (expected, "stop")


def test_several_choices(client: openai.OpenAI) -> None:
    answer = chat(client, "abc", n=3, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {("abc" * 7)[:20]}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 60)
    chunks = streamed(client, "abc", n=3, stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(3)] == [("abc" * 7)[:20]] * 3
    assert chunks[-1].usage == answer.usage


def test_logprobs(client: openai.OpenAI) -> None:
    (choice,) = chat(client, "aé", max_tokens=3, logprobs=True, top_logprobs=2).choices
    first, second, third = choice.logprobs.content
    assert (first.token, first.bytes, len(first.top_logprobs)) == ("a", [97], 2)
    assert bytes(second.bytes + third.bytes).decode() == "é"
    assert first.logprob == first.top_logprobs[0].logprob < 0
    chunks = streamed(client, "aé", max_tokens=3, logprobs=True, top_logprobs=2)
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in parts if part for token in part.content or ()] == choice.logprobs.content


def test_a_tool_call(client: openai.OpenAI) -> None:
    (choice,) = chat(client, TOOL_OUTPUT, tools=TOOLS, max_tokens=len(TOOL_OUTPUT)).choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "weather", PARIS)
    assert choice.message.content == "I look."
    (plain,) = chat(client, TOOL_OUTPUT, tools=TOOLS, tool_choice="none", max_tokens=len(TOOL_OUTPUT)).choices
    assert (plain.message.content, plain.message.tool_calls) == (TOOL_OUTPUT, None)


CITIES: Any = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}}, "required": ["city"]}
CITIES |= {"additionalProperties": False}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "content", "cities"),
    [
        ("required", CALL, ["Paris"]),
        ("required", "What is the weather?", ["Oslo"]),  # the engine takes the first token that is allowed
        ({"type": "function", "function": {"name": "weather"}}, CALL, ["Paris"]),
        ("auto", CALL.replace("Paris", "Paree"), ["Paris"]),
        ("auto", "It rains.", []),
    ],
)
def test_calls_that_match_their_schema(client: openai.OpenAI, choice: Any, content: str, cities: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITIES, "strict": True}}]
    params: Any = {"tools": tools, "tool_choice": choice, "max_tokens": 100, "parallel_tool_calls": False}
    params |= {"stop": "rains."} if not cities else {}
    (said,) = chat(client, content, **params).choices
    calls = said.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": city}) for city in cities
    ]
    assert said.finish_reason == ("tool_calls" if cities else "stop")
    chunks = streamed(client, content, **params)
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    texts = ["" for _ in cities]
    for piece in pieces:
        texts[piece.index] += (piece.function and piece.function.arguments) or ""
    assert texts == [call.function.arguments for call in calls]
    assert text_of(chunks) == (said.message.content or "")
    assert chunks[-1].choices[0].finish_reason == said.finish_reason


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=["ab", "cde"], max_tokens=6, n=2, temperature=1)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "ababab", "length"),
        (1, "ababab", "length"),
        (2, "cdecde", "length"),
        (3, "cdecde", "length"),
    ]
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 24)
    chunks = list(client.completions.create(model=NAME, prompt=["ab", "cde"], max_tokens=6, n=2, stream=True))
    for choice in answer.choices:
        own = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in own) == choice.text
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]


@pytest.mark.parametrize(
    ("prompt", "length", "texts", "outputs"),
    [
        ([1, 2], 2, ['"#'], ['"#"#']),
        ([[32, 33], [2]], 3, ["AB", "#"], ["ABAB", "####"]),
        ([3, 256, 4], 3, ["$</s>%"], ["$"]),  # the end of sequence is a token like any other in a prompt
    ],
)
def test_prompts_of_token_ids(
    client: openai.OpenAI, prompt: Any, length: int, texts: list[str], outputs: list[str]
) -> None:
    params: Any = {"model": NAME, "max_tokens": 4, "prompt": prompt}
    answer = client.completions.create(**params)
    assert [choice.text for choice in answer.choices] == outputs
    assert answer.usage
    assert answer.usage.prompt_tokens == length
    echoed = client.completions.create(**params, echo=True, logprobs=0)
    assert [choice.text for choice in echoed.choices] == [a + b for a, b in zip(texts, outputs, strict=True)]
    chunks = list(client.completions.create(**params, echo=True, stream=True))
    for choice in echoed.choices:
        own = [each.text for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(own) == choice.text


@pytest.mark.parametrize(
    ("prompt", "field", "said"),
    [
        ([], "prompt", "prompt cannot be empty"),
        ([[]], "prompt[0]", "prompt[0] gives no token"),
        ([1, "a"], "prompt", "prompt must be a text, token ids, or several of one of them"),
        ([[1], [1, 257]], "prompt[1]", "prompt[1] gives token id 257, the model has only those below 257"),
        ([1] * 300, "prompt[0]", "input tokens (300) plus prefix length (0) must be < 200"),
        ([1, "a", *[1] * 298], "prompt[0]", "input tokens (300) plus prefix length (0) must be < 200"),
        ([*[1] * 299, "a"], "prompt", "prompt must be a text, token ids, or several of one of them"),
        ([*["a"] * 200, 1], "prompt", "prompt must have at most 4 prompts (MAX_CLIENT_BATCH_SIZE), got 201"),
    ],
)
def test_bad_prompts(client: openai.OpenAI, prompt: Any, field: str, said: str) -> None:
    ways: list[dict[str, Any]] = [{}, {"stream": True}, {"echo": True}]
    for params in ways:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, prompt=prompt, **params)
        assert caught.value.param == field
        assert said in caught.value.message


def test_a_completion_has_other_logprobs_than_a_chat(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="logprobs must be <= 20, got 21") as caught:
        client.completions.create(model=NAME, prompt="a", logprobs=21)
    assert caught.value.param == "logprobs"


TIMINGS = ["x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"]


def test_headers_as_on_the_routes_of_tgi(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hällo"}]
    create, complete = client.chat.completions.with_raw_response.create, client.completions.with_raw_response.create
    chat_headers = create(model=NAME, messages=messages, max_tokens=7, n=2).headers
    headers = complete(model=NAME, prompt=["ab", "cde"], max_tokens=7).headers
    names = ("x-compute-type", "x-compute-characters", "x-prompt-tokens", "x-generated-tokens")
    assert [chat_headers[name] for name in names] == ["1-none", "5", "6", "14"]
    assert [headers[name] for name in names] == ["1-none", "5", "5", "14"]
    for found in (chat_headers, headers):
        total, validation, queue, inference, per_token = (int(found[name]) for name in TIMINGS)
        assert total + 3 >= validation + queue + inference  # each is truncated
        assert inference >= 2 * 7 * 2  # two outputs, seven tokens, steps of 2 ms
        assert per_token >= 2 * 2
        assert 0.014 <= float(found["x-compute-time"]) < total / 1000  # of the call, not the sum over two outputs
    streamed = create(model=NAME, messages=messages, max_tokens=7, stream=True).headers
    assert [streamed.get(name) for name in names] == ["1-none", "5", None, None]


def test_the_best_of_several(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=["ab", "cd"], max_tokens=4, n=1, best_of=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "abab"), (1, "cdcd")]
    assert answer.usage
    assert answer.usage.completion_tokens == 24
    with pytest.raises(openai.BadRequestError, match="best_of must be >= 3, got 2"):
        client.completions.create(model=NAME, prompt="ab", n=3, best_of=2)


def test_a_prompt_goes_on_as_far_as_the_context(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="a" * 40)
    assert answer.usage
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (MAX_LENGTH, "length")


def test_models(client: openai.OpenAI) -> None:
    first, second = client.models.list().data
    assert (first.id, second.id, second.model_extra and second.model_extra["parent"]) == (NAME, "tuned/one", NAME)
    assert client.models.retrieve("tuned/one") == second
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match=r"'two\\nlines' does not exist"):  # JSON, like all errors
        client.models.retrieve("two\nlines")


def test_the_document_knows_the_last_event(server: Server) -> None:
    document = json.loads(server.get("/openapi.json")[1])
    content = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    event, last = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
    schemas = event["contentSchema"]["anyOf"]
    assert [each["$ref"].rpartition("/")[2] for each in schemas] == ["Completion", "ErrorBody"]
    assert last == {"const": "[DONE]"}


def test_other_names_mean_the_model(client: openai.OpenAI) -> None:
    assert chat(client, "ab", model="gpt-4", max_tokens=2).model == NAME
    with pytest.raises(openai.BadRequestError, match="takes no adapters"):
        chat(client, "ab", model="tuned/one")


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "temperature": ({"temperature": -0.5}, "temperature", "temperature must be >= 0, got -0.5"),
    "top_p": ({"top_p": 1.5}, "top_p", "top_p must be > 0.0 and <= 1.0, got 1.5"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", "max_tokens must be >= 1, got 0"),
    "stop": ({"stop": [""]}, "stop", "can specify at most 16 non-empty stop sequences"),
    "n": ({"n": 129}, "n", "n must be <= 128, got 129"),
    "stop_token_ids": ({"extra_body": {"stop_token_ids": [257]}}, "stop_token_ids", "token ids below 257, got 257"),
    "allowed": ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids", "allowed_token_ids must not be empty"),
    "min_p": ({"extra_body": {"min_p": 1.5}}, "min_p", "min_p must be >= 0.0 and <= 1.0, got 1.5"),
    "bad_words": ({"extra_body": {"bad_words": ["a"] * 129}}, "bad_words", "bad_words must be at most 128, got 129"),
    "prompt_logprobs": ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs", "must be <= 20, got 21"),
    "continues": (
        {"extra_body": {"add_generation_prompt": True, "continue_final_message": True}},
        "continue_final_message",
        "continue_final_message and add_generation_prompt are mutually exclusive",
    ),
    "seed": ({"seed": 2**64}, "seed", "seed must be <= 18446744073709551615"),
    "frequency": ({"frequency_penalty": 3}, "frequency_penalty", "frequency_penalty must be >= -2.0 and <= 2.0, got 3"),
    "bias": ({"logit_bias": {"999": 1}}, "logit_bias", "logit_bias must have token ids below 257, got 999"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be <= 20, got 21"),
    "format": ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema, got xml"),
    "tools": ({"tools": TOOLS * 1025}, "tools", "tools must be at most 1024, got 1025"),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "response_format.json_schema must have a schema",
    ),
    "format and tools": (
        {"response_format": {"type": "json_object"}, "tools": TOOLS},
        "response_format",
        "Grammar and tools are mutually exclusive",
    ),
    "structured": (
        {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b", "c"]}}},
        "structured_outputs",
        "must have one of json, regex, choice, grammar and json_object, got 2",
    ),
    "formats": (
        {"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}},
        "structured_outputs",
        "response_format, structured_outputs and guided_... are mutually exclusive",
    ),
    "tool_choice": ({"tools": TOOLS, "tool_choice": "sing"}, "tool_choice", "required or one of the tools, got sing"),
    "strict": (
        {"tools": [{"function": {"name": "x", "strict": True, "parameters": {"not": {}}}}]},
        "tools",
        'tools: unsupported keywords: ["not"] in tools[0].function.parameters',
    ),
    "long": ({"messages": [{"role": "user", "content": "x" * 190}]}, "messages", "plus max_tokens (20) must be"),
    "variables": (
        {"extra_body": {"chat_template_kwargs": {"x": 1, "messages": []}}},
        "chat_template_kwargs",
        "chat_template_kwargs must not have messages",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0]", "messages[0] has neither content nor tool_calls"),
    "no messages": ({"messages": []}, "messages", "messages cannot be empty"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
        "messages[0].content[0]",
        "must have the type text and a text, got image_url",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_name_their_field(client: openai.OpenAI, name: str, stream: bool) -> None:
    params, field, said = BAD[name]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "abc", stream=stream, **params)
    assert caught.value.param == field
    assert said in caught.value.message
    code = None
    if name == "long":
        code = "context_length_exceeded"
        assert "This model's maximum context length is 200 tokens, the prompt is too long: " in caught.value.message
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", code)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        ({}, 400),
        ({"messages": "hello"}, 400),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}, 400),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1.5}, 400),
    ],
)
def test_bodies_of_the_wrong_types(server: Server, body: Any, status: int) -> None:
    found, answer = server.post("/v1/chat/completions", body)
    assert (found, answer["error"]["type"], answer["error_type"]) == (status, "invalid_request_error", "validation")


@pytest.mark.parametrize("place", ["guided_json", "chat_template_kwargs", "parameters", "arguments", "as text"])
def test_json_of_any_depth_is_answered_or_refused(server: Server, place: str) -> None:
    """Some depths can be read and not written again."""
    statuses = set()
    for depth in [1, *range(900, 1000), 5000]:
        value = '{"properties":' * depth + "{}" + "}" * depth
        call = [{"function": {"name": "x", "arguments": "DEEP" if place == "arguments" else json.dumps("DEEP")}}]
        messages = [{"role": "assistant", "tool_calls": call}] if place in ("arguments", "as text") else []
        body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": "a"}], "max_tokens": 1}
        if place == "parameters":
            body |= {"tools": [{"function": {"name": "x", "parameters": "DEEP"}}], "tool_choice": "required"}
        elif not messages:
            body[place] = "DEEP"
        if place == "as text":
            data = json.dumps(body).replace(json.dumps(json.dumps("DEEP")), json.dumps(value))
        else:
            data = json.dumps(body).replace('"DEEP"', value)
        statuses.add(server.post("/v1/chat/completions", data.encode())[0])
    assert statuses <= {200, 400}


SECRET = "a secret of a client that no error tells to anyone else"
SECRETS = st.sampled_from(
    [SECRET, f"{SECRET}(", f'"{SECRET}', json.dumps({"const": f"{SECRET}\\ud800", "maxLength": 1})]
)
KEYWORDS = ["const", "pattern", "type", "format", "$ref", "enum", "maxLength", "required", "items"]
VALUES = st.recursive(
    SECRETS | st.sampled_from([None, True, 0, 1, -1, 1.5, 10**30]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYWORDS) | SECRETS, inner, max_size=3),
    max_leaves=5,
)
BODIES: dict[str, list[type]] = {
    "/v1/chat/completions": [ChatCompletionRequest],
    "/v1/completions": [CompletionRequest],
    "/generate": [GenerateRequest, GenerateParameters],
    "/tokenize": [GenerateRequest],
    "/chat_tokenize": [ChatCompletionRequest],
    "/invocations": [ChatCompletionRequest, CompletionRequest, GenerateRequest],
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(BODIES)))
    names = sorted({field.encode_name for kind in BODIES[path] for field in msgspec.structs.fields(kind)} - {"model"})
    changed = draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=3))
    function = {"name": draw(SECRETS), "parameters": draw(VALUES), "arguments": draw(SECRETS), "strict": True}
    messages = [{"role": "assistant", "content": SECRET, "tool_calls": [{"function": function}]}]
    base: dict[str, Any] = {"messages": messages, "prompt": SECRET, "inputs": SECRET, "max_tokens": 1}
    more = st.sampled_from([{}, {"tools": [{"function": function}], "tool_choice": "required"}])
    kind = draw(st.sampled_from(["json", "regex", "json_schema", SECRET]))
    grammar = {"max_new_tokens": 1, "grammar": {"type": kind, "value": draw(VALUES)}}
    return path, base | {"parameters": grammar} | draw(more) | changed


def check_error(server: Server, request: tuple[str, dict[str, Any]]) -> None:
    status, answer = server.post(*request)
    assert status < 500
    assert status == 200 or SECRET[:41] not in json.dumps(answer)


@pytest.mark.parametrize("examples", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_errors_tell_no_text_of_a_request(server: Server, examples: int) -> None:
    settings(max_examples=examples)(given(bodies())(lambda request: check_error(server, request)))()


def test_a_failed_step_is_an_error(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="failed during generation"):
        chat(client, "!")  # a poisoned token


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with a special token that its configuration does not know as the end of an answer."""
    directory = tmp_path_factory.mktemp("special")
    model = make_fake_model(directory / "model", 100)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([IM_END])
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 258}))
    with running_server(directory, model, DEPLOYMENT_FRAMEWORK="fake") as running:
        yield running


IM_END = "<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "num_tokens"),
    [
        ({"stop": IM_END}, "ab", 3),
        ({"stop": ["zz", IM_END], "include_stop_str_in_output": True, "skip_special_tokens": False}, "ab" + IM_END, 3),
        ({"stop": IM_END, "skip_special_tokens": False}, "ab", 3),
        ({"stop_token_ids": [257]}, "ab", 3),
        ({"stop_token_ids": [67]}, "ab", 4),  # "d": a token that has text is cut as a stop text is
        ({"stop_token_ids": [67], "include_stop_str_in_output": True}, "abd", 4),
        ({"stop_token_ids": [257], "ignore_eos": True, "n": 2}, "ab", 6),
    ],
)
def test_stops_at_tokens(chat_model: Server, stream: bool, fields: Any, text: str, num_tokens: int) -> None:
    options: Any = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
    with connected(chat_model) as client:
        answer = client.completions.create(model="", prompt=f"ab{IM_END}d", extra_body=fields, **options)
        chunks: Any = list(answer) if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    assert "".join(choice.text for choice in choices) == text
    assert (choices[-1].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", num_tokens)


def test_tgi_stops_at_special_tokens(chat_model: Server) -> None:
    body = {"inputs": f"ab{IM_END}cd", "parameters": {"stop": [IM_END], "max_new_tokens": 9, "details": True}}
    _, answer = chat_model.post("/generate", body)
    details = answer["details"]
    assert (answer["generated_text"], details["finish_reason"], details["generated_tokens"]) == (
        "ab",
        "stop_sequence",
        3,
    )


def test_grpc_does_not_stop_at_special_tokens(chat_model: Server) -> None:
    """As in TGIS, whose stop sequences are compared with text."""
    stopping = pb.StoppingCriteria(max_new_tokens=5, stop_sequences=[IM_END])
    request = pb.GenerationRequest(text=f"ab{IM_END}cd")
    with chat_model.stub() as stub:
        message = pb.BatchedGenerationRequest(requests=[request], params=pb.Parameters(stopping=stopping))
        (response,) = stub.Generate(message, timeout=20).responses
    assert (response.text, response.stop_reason) == ("abcd", pb.MAX_TOKENS)


ASKED = {"role": "user", "content": "abc"}
CONTINUED = [ASKED, {"role": "assistant", "content": "xy"}]


@pytest.mark.parametrize(
    ("fields", "text", "num_tokens"),
    [
        ({"max_tokens": 4.0}, "abca", 4),
        ({"max_tokens": "4"}, "abca", 4),
        ({"max_tokens": 170}, ("abc" * 57)[:MAX_NEW], MAX_NEW),  # what fits
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}, ASKED]}, "abc|>", 5),
        ({"messages": [{"role": "assistant", "refusal": "I will not."}, ASKED]}, "abc|>", 5),
        ({"messages": [ASKED, {"role": "assistant", "refusal": "no"}]}, "nonon", 5),
        ({"messages": CONTINUED}, "xyxyx", 5),
        ({"messages": CONTINUED, "add_generation_prompt": True}, "xy|>x", 5),
        ({"messages": CONTINUED, "add_generation_prompt": False}, "xy|xy", 5),
        ({"messages": CONTINUED, "add_generation_prompt": False, "continue_final_message": True}, "xyxyx", 5),
        ({"messages": [ASKED], "continue_final_message": True}, "abcab", 5),
        ({"truncate_prompt_tokens": 2}, "bcbcb", 5),
        ({"truncate_prompt_tokens": -1}, "abcab", 5),
    ],
)
def test_requests_as_clients_of_vllm_send_them(server: Server, fields: Any, text: str, num_tokens: int) -> None:
    body = {"messages": [ASKED], "max_tokens": 5, "chat_template_kwargs": {"marks": "messages" in fields}} | fields
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "length")
    assert answer["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_prompt(client: openai.OpenAI, stream: bool) -> None:
    """As tools that rate texts ask for it."""
    params: Any = {"model": NAME, "prompt": ["abc", "de"], "max_tokens": 0, "echo": True, "logprobs": 1, "suffix": ""}
    options: Any = {"stream": stream, "stream_options": {"include_usage": True} if stream else None}
    answer = client.completions.create(**params, **options)
    chunks: Any = list(answer) if stream else [answer]
    for index, text in enumerate(params["prompt"]):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.text for choice in own) == text
        assert [token for choice in own for token in choice.logprobs.tokens] == [*text]
        assert [offset for choice in own for offset in choice.logprobs.text_offset] == [*range(len(text))]
        assert own[-1].finish_reason == "length"
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 0)


def test_logprobs_of_a_prompt(server: Server) -> None:
    body: dict[str, Any] = {"max_tokens": 2, "prompt_logprobs": 2}
    _, answer = server.post("/v1/completions", body | {"prompt": "abc"})
    found = answer["choices"][0]["prompt_logprobs"]
    assert [each[str(ord(letter) - 33)]["decoded_token"] for each, letter in zip(found, "abc", strict=True)] == [*"abc"]
    _, answer = server.post("/v1/chat/completions", body | {"messages": [ASKED]})
    assert answer["prompt_logprobs"] == found
    status, answer = server.post("/v1/completions", body | {"prompt": "abc", "stream": True})
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


def test_calls_are_counted_and_logged_with_their_api(server: Server, client: openai.OpenAI) -> None:
    def counts() -> dict[tuple[str, ...], float]:
        values = parse_metrics(server.get("/metrics")[1])
        return {name[1:]: value for name, value in values.items() if name[0] == "tgi_call_count_total"}

    before, chats = counts(), "/v1/chat/completions"
    chat(client, "abc")
    list(chat(client, "abc", stream=True))
    for params in ({"temperature": -1}, {"n": 2**40}, {"temperature": -1, "stream": True}):
        with pytest.raises(openai.BadRequestError):
            chat(client, "abc", **params)
    with pytest.raises(openai.APIError):
        list(chat(client, "abc!", stream=True))  # fails after three tokens
    server.post("/generate", {"inputs": ""})
    with server.stub() as stub, pytest.raises(grpc.RpcError):
        stub.GenerateStream(pb.SingleGenerationRequest()).next()
    wanted = {("openai", chats, "200"): 2, ("openai", chats, "400"): 3, ("openai", chats, "500"): 1}
    wanted |= {("tgi", "/generate", "422"): 1, ("grpc", "GenerateStream", "INVALID_ARGUMENT"): 1}

    def all_counted() -> bool:
        grown = {name: value - before.get(name, 0) for name, value in counts().items()}
        return {name: value for name, value in grown.items() if value} == wanted

    wait_until(all_counted, f"counts {wanted}")  # a call over gRPC ends for its client before it is counted
    assert re.search(r"single request: 20 tokens, MAX_TOKENS .*api=openai ", server.log.read_text())


def test_unknown_fields_are_counted_and_logged_once(server: Server) -> None:
    before = server.metric("tgi_request_unknown_fields_total")
    for _ in range(2):
        body = {"messages": [ASKED], "max_tokens": 1, "mystery": {"x": 1}, "no identifier\n": 2, "user": "me"}
        assert server.post("/v1/chat/completions", body)[0] == 200
    assert server.metric("tgi_request_unknown_fields_total") == before + 4
    log = server.log.read_text()
    assert log.count("the field mystery, which is unknown here and has no effect") == 1
    assert "identifier" not in log
    many = {f"field_{number}": 1 for number in range(50_000)}  # looked at as far as clients have fields
    assert server.post("/v1/chat/completions", {"messages": [ASKED], "max_tokens": 1, **many})[0] == 200
    assert server.metric("tgi_request_unknown_fields_total") == before + 4 + 98
    assert server.log.read_text().count("which is unknown here") <= 100


def test_fields_may_be_null_and_unknown(server: Server) -> None:
    nulls = {field.name: None for field in msgspec.structs.fields(ChatCompletionRequest) if not field.required}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    status, answer = server.post("/v1/chat/completions", nulls | body | {"max_tokens": 4, "future": {"x": 1}})
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "abab")


def test_routes_of_tgi_take_chats(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 3, "temperature": 0}
    status, answer = server.post("/chat_tokenize", body)
    assert (status, answer["templated_text"]) == (200, "hé")
    spans = [(token["start"], token["stop"], token["text"]) for token in answer["tokenize_response"]]
    assert spans == [(0, 1, "h"), (1, 3, "é"), (1, 3, "é")]
    status, answer = server.post("/invocations", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hé")
