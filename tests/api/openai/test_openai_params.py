"""From bodies of the OpenAI API to parameters, to a call of the front end, and to what a chat template gets."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from described_params import described
from harness import run_async
from scripted_api import LIMITS, ask, whole

from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from tgis.api.openai.messages import template_messages, template_tools
from tgis.api.openai.models import ServedModels
from tgis.api.openai.params import chat_params, completion_params
from tgis.api.openai.requests import RequestReader
from tgis.config import Config
from tgis.errors import InvalidRequest
from tgis.frontend.calls import CallKind
from tgis.frontend.validation import validate
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions

CALL: Any = SimpleNamespace(
    config=Config(model_name="m"),
    generator=SimpleNamespace(server_info=SimpleNamespace(limits=LIMITS)),
    special_token_ids=lambda texts: (2,) if "</s>" in texts else (),
)
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "p"}]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat_body(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert(USER | fields, ChatCompletionRequest, strict=False)


def completion_body(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "p"} | fields, CompletionRequest, strict=False)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {"temperature": 1.0}),
        ({"temperature": 0, "seed": 4}, {"seed": 4}),
        ({"temperature": 0.5, "top_p": 0, "top_k": -1}, {"temperature": 0.5, "top_p": 1e-9}),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.25}, {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "min_p": 0.25}),
        ({"repetition_penalty": 0, "temperature": 0}, {"repetition_penalty": 0.0}),  # refused
        (
            {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 1, "presence_penalty": -1},
            {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": -1.0},
        ),
        (
            {"temperature": 0, "max_tokens": 1000, "min_tokens": 3, "truncate_prompt_tokens": -1},
            {"max_new_tokens": 100, "min_new_tokens": 3, "truncate_input_tokens": 199},
        ),
        (
            {"temperature": 0, "stop": ["a", "</s>"], "stop_token_ids": [7], "ignore_eos": True, "seed": -1},
            {"stop_sequences": ("a", "</s>"), "stop_token_ids": (7, 2), "ignore_eos": True, "seed": 2**64 - 1},
        ),
        (
            {"temperature": 0, "stop": "a", "include_stop_str_in_output": True, "logit_bias": {"3": -1}},
            {"stop_sequences": ("a",), "include_stop_sequence": True, "logit_bias": {3: -1.0}},
        ),
        (
            {"temperature": 0, "bad_words": ["x"], "allowed_token_ids": [1], "skip_special_tokens": False},
            {"bad_words": ("x",), "allowed_token_ids": (1,), "skip_special_tokens": False},
        ),
        ({"temperature": 0, "allowed_token_ids": []}, {"allowed_token_ids": ()}),  # refused
        ({"temperature": 0, "guided_regex": "a"}, {"grammar": GrammarSpec(GrammarKind.REGEX, "a")}),
    ],
)
def test_sampling_fields(body: dict[str, Any], expected: dict[str, Any]) -> None:
    nulls = {name: None for name in ChatCompletionRequest.__struct_fields__ if name not in ("messages", *body)}
    expected = {"fill_context": True, "include_stop_sequence": False} | expected
    assert described(completion_params(completion_body(**body), CALL), "logprob_options") == expected
    for fields in (body, body | nulls):
        chat = chat_params(chat_body(**fields), CALL, parses_tools=False)
        assert described(chat, "logprob_options") == expected | {"add_special_tokens": False}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"max_tokens": 4.0}, {"max_new_tokens": 4}),  # as clients of vLLM send them
        ({"max_tokens": "4"}, {"max_new_tokens": 4}),
        ({"max_tokens": 4, "max_completion_tokens": 5}, {"max_new_tokens": 5}),
        (
            {"add_special_tokens": True, "parses_tools": True},
            {"add_special_tokens": True, "skip_special_tokens": False},
        ),
    ],
)
def test_fields_of_chats(body: dict[str, Any], params: dict[str, Any]) -> None:
    parses_tools = body.pop("parses_tools", False)
    found = chat_params(chat_body(**body), CALL, parses_tools=parses_tools)
    assert {name: getattr(found, name) for name in params} == params


@pytest.mark.parametrize(
    ("chat", "completion", "options"),
    [
        ({}, {}, {}),
        ({"logprobs": True}, {"logprobs": 0}, {"generated_tokens": True, "logprobs": True}),
        (
            {"logprobs": True, "top_logprobs": 3},
            {"logprobs": 3},
            {"generated_tokens": True, "logprobs": True, "top_n_tokens": 3},
        ),
        ({"top_logprobs": 3}, {"echo": True}, {}),
        (None, {"best_of": 2}, {"generated_tokens": True, "logprobs": True}),
        (
            None,
            {"logprobs": 1, "echo": True},
            {"generated_tokens": True, "input_tokens": True, "logprobs": True, "top_n_tokens": 1},
        ),
        (
            {"prompt_logprobs": 2},
            {"prompt_logprobs": 2},
            {"input_tokens": True, "logprobs": True, "ranks": True, "top_n_tokens": 2},
        ),
    ],
)
def test_which_logprobs_are_asked_for(chat: Any, completion: dict[str, Any], options: dict[str, Any]) -> None:
    expected = LogprobOptions(exact_top_n=True, **options)
    assert completion_params(completion_body(**completion), CALL).logprob_options == expected
    if chat is not None:
        assert chat_params(chat_body(**chat), CALL, parses_tools=False).logprob_options == expected


SCHEMA = {"const": 1}
TEXT = '{"const":1}'
JSON_OBJECT, REGEX = GrammarSpec(GrammarKind.JSON_OBJECT), GrammarSpec(GrammarKind.REGEX, "a")
CHOICE, EBNF = GrammarSpec(GrammarKind.CHOICE, choices=("a", "b")), GrammarSpec(GrammarKind.GRAMMAR, "g")


def of_format(**fields: Any) -> dict[str, Any]:
    return {"response_format": fields}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (of_format(type="text"), None),
        (of_format(type="json_object"), JSON_OBJECT),
        (of_format(type="json_schema", json_schema={"name": "x", "schema": SCHEMA}), TEXT),
        (of_format(type="json_object", schema=SCHEMA), TEXT),
        (of_format(type="json", value=SCHEMA), TEXT),
        (of_format(type="json_schema", value={"schema": SCHEMA}), TEXT),
        (of_format(type="json_object", value=TEXT), TEXT),
        (of_format(type="regex", value="a"), REGEX),
        ({"structured_outputs": {"json": SCHEMA}}, TEXT),
        ({"structured_outputs": {"json_object": True}}, JSON_OBJECT),
        ({"structured_outputs": {"regex": "a"}}, REGEX),
        ({"structured_outputs": {"choice": ["a", "b"]}}, CHOICE),
        ({"structured_outputs": {"grammar": "g"}}, EBNF),
        ({"guided_json": TEXT}, TEXT),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, REGEX),
        ({"guided_choice": ["a", "b"]}, CHOICE),
        ({"guided_grammar": "g"}, EBNF),
    ],
)
def test_output_formats(fields: dict[str, Any], expected: GrammarSpec | str | None) -> None:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, expected) if isinstance(expected, str) else expected
    assert completion_params(completion_body(**fields), CALL).grammar == spec


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.5}, "temperature", "temperature must be >= 0, got -0.5"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be >= 1, got 0"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "min_tokens must be <= max_tokens, got 3 and 2"),
    ({"stop": [""]}, "stop", "can specify at most 16 non-empty stop sequences"),
    ({"n": 129}, "n", "n must be <= 128, got 129"),
    ({"seed": 2**64}, "seed", "seed must be <= 18446744073709551615"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "truncate_prompt_tokens must be >= 1, got 0"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "must be <= 20, got 21"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be <= 20, got 21"),
    ({"response_format": {"type": "xml"}}, "response_format", "text, json_object or json_schema, got xml"),
    ({"response_format": {"type": "regex"}}, "response_format", "response_format.regex must be a text"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema must have a schema"),
    ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "response_format", "Grammar and tools are mutually"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "and json_object, got 2"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "structured_outputs", "mutually exclusive"),
    ({"tools": TOOLS, "tool_choice": "sing"}, "tool_choice", "required or one of the tools, got sing"),
    ({"tools": TOOLS * 1025}, "tools", "tools must be at most 1024, got 1025"),
    ({"messages": []}, "messages", "messages cannot be empty"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "messages[0] has neither content nor tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0]", "a text, got x"),
]
BAD_COMPLETIONS = [
    ({"suffix": "x"}, "suffix", "suffix is not supported"),
    ({"logprobs": 21}, "logprobs", "logprobs must be <= 20, got 21"),
    ({"n": 3, "best_of": 2}, "best_of", "best_of must be >= 3, got 2"),
    ({"best_of": 2, "stream": True}, "best_of", "best_of must be <= 1, got 2"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "prompt_logprobs are not available in a stream"),
    ({"prompt": ["a"] * 4, "n": 33}, "n", "n must be <= 32, got 33"),
]


@pytest.mark.parametrize(("fields", "field", "text"), [*BAD, *BAD_COMPLETIONS])
@run_async
async def test_bad_requests_name_their_field(fields: dict[str, Any], field: str, text: str) -> None:
    is_completion = (fields, field, text) in BAD_COMPLETIONS
    path, base = (COMPLETIONS, {"prompt": "p"}) if is_completion else (CHAT, USER)
    answer = await ask(path, base | fields, max_concurrent_requests=128)
    error = answer.body["error"]
    assert (answer.status, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert text in error["message"]


@pytest.mark.parametrize("body", [b"{", {}, {"messages": "hello"}, USER | {"max_tokens": -1}, USER | {"n": 1.5}])
@run_async
async def test_bodies_of_the_wrong_types(body: Any) -> None:
    answer = await ask(CHAT, body)
    found = answer.status, answer.body["error"]["type"], answer.body["error_type"]
    assert found == (400, "invalid_request_error", "validation")


@pytest.mark.parametrize("place", ["guided_json", "chat_template_kwargs", "parameters", "arguments", "as text"])
@run_async
async def test_json_of_any_depth_is_answered_or_refused(place: str) -> None:
    """Some depths can be read and not written again."""
    for depth in [1, *range(900, 1000, 14), 5000]:
        value = '{"properties":' * depth + "{}" + "}" * depth
        call = [{"function": {"name": "x", "arguments": "DEEP" if place == "arguments" else json.dumps("DEEP")}}]
        messages = [{"role": "assistant", "tool_calls": call}] if place in ("arguments", "as text") else []
        body: dict[str, Any] = {"messages": [*messages, *USER["messages"]]}
        if place == "parameters":
            body |= {"tools": [{"function": {"name": "x", "parameters": "DEEP"}}], "tool_choice": "required"}
        elif not messages:
            body[place] = "DEEP"
        deep, text = ('"DEEP"', value) if place != "as text" else (json.dumps(json.dumps("DEEP")), json.dumps(value))
        assert (await ask(CHAT, json.dumps(body).replace(deep, text).encode(), whole())).status in (200, 400)


@run_async
async def test_calls_of_the_front_end() -> None:
    stop = {"temperature": 0, "stop": "</s>", "user": "me"}
    call = (await ask(CHAT, USER | stop | {"n": 2, "model": "other"}, whole(), whole(index=1))).call
    assert call is not None
    assert (call.kind, call.texts, call.fields, call.n) == (CallKind.BATCH, ["p"], ["messages"], 2)
    assert (call.token_ids, call.adapter, call.api) == (None, None, "openai")
    assert call.params.sampling.stop_token_ids == (256,)  # a special token of the model
    call = (await ask(COMPLETIONS, {"prompt": [[1], [2, 3]], "stream": True})).call
    assert call is not None
    assert (call.kind, call.texts, call.token_ids) == (CallKind.STREAM, ["", ""], [[1], [2, 3]])
    assert call.fields == ["prompt[0]", "prompt[1]"]


def test_messages_for_a_template() -> None:
    function: dict[str, Any] = {"name": "w", "arguments": '{"city": "Oslo"}'}
    body = chat_body(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": function}, {"function": {"name": "x"}}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "assistant", "refusal": "no"},
            {"role": "tool", "tool_call_id": "1", "content": "7"},
        ],
        tools=TOOLS,
    )
    calls = [
        {"type": "function", "function": {"name": "w", "arguments": {"city": "Oslo"}}, "id": "1"},
        {"type": "function", "function": {"name": "x", "arguments": ""}},
    ]
    assert template_messages(body.messages) == [
        {"role": "user", "content": "ab", "name": "me"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "no"},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    assert template_tools(body.tools or ()) == TOOLS


def read(reader: RequestReader, **fields: Any) -> tuple[CompletionRequest, int]:
    """The body, and how many of its fields are unknown."""
    counted: list[int] = []
    metrics = SimpleNamespace(requests=SimpleNamespace(unknown_fields=SimpleNamespace(inc=counted.append)))
    body = completion_body(**{name: fields[name] for name in fields if name in CompletionRequest.__struct_fields__})
    data = json.dumps({"prompt": "p"} | fields).encode()
    call: Any = SimpleNamespace(body=lambda *_, **__: body, data=data, generator=SimpleNamespace(metrics=metrics))
    return reader.read(call, CompletionRequest), sum(counted)


def test_unknown_fields_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = RequestReader({})
    for _ in range(2):
        assert read(reader, user="me", mystery={"x": 1}, **{"no identifier\n": 2})[1] == 2
    assert caplog.messages == ["requests have the field mystery, which is unknown here and has no effect"]
    assert read(reader, **{f"field_{number}": 1 for number in range(50_000)})[1] == 99  # looked at as far as 100
    assert len(caplog.messages) <= 100


def test_the_model_has_defaults_of_sampling(caplog: pytest.LogCaptureFixture) -> None:
    body, _ = read(RequestReader({"temperature": 0.5, "top_k": 7, "other": 1}), top_k=3)
    assert (body.temperature, body.top_k, body.top_p) == (0.5, 3, None)
    assert caplog.messages == []
    body, _ = read(RequestReader({"temperature": -1, "top_k": 7}))
    assert (body.temperature, body.top_k) == (None, None)
    assert "no sampling defaults" in caplog.text


@run_async
async def test_a_model_that_is_no_adapter_means_the_model() -> None:
    catalog: Any = SimpleNamespace(has=lambda name: name == "tuned")
    models = ServedModels(("served", "path"), catalog)
    found = [await models.adapter(name) for name in (None, "", "tgi", "served", "path", "gpt-4", "tuned")]
    assert found == [None] * 6 + ["tuned"]


def test_rules_are_those_of_openai() -> None:
    for fields, allowed in (
        ({"temperature": 0.01}, True),
        ({"stop": ["x" * 1024] * 16}, True),
        ({"stop": "x" * 1025}, False),
    ):
        params = completion_params(completion_body(**fields), CALL)
        if allowed:
            validate(params, LIMITS)
        else:
            with pytest.raises(InvalidRequest, match="not more than 1024"):
                validate(params, LIMITS)
