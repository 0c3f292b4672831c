"""From bodies of the OpenAI API to parameters, to a call of the front end, and to what a chat template gets."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from described_params import described, plain
from harness import run_async
from scripted_api import CALL, ask, output
from tables import table

from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from tgis.api.openai.messages import template_messages, template_tools
from tgis.api.openai.params import chat_params, completion_params
from tgis.api.openai.requests import RequestReader
from tgis.frontend.calls import CallKind

USER: dict[str, Any] = {"messages": [{"role": "user", "content": "p"}]}
ANSWER = output(reason="MAX_TOKENS")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat_body(**fields: Any) -> ChatCompletionRequest:
    return msgspec.convert(USER | fields, ChatCompletionRequest, strict=False)


def completion_body(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "p"} | fields, CompletionRequest, strict=False)


@table("parameters", "openai")
def test_sampling_fields(row: dict[str, Any]) -> None:
    body = row["body"]
    nulls = {name: None for name in ChatCompletionRequest.__struct_fields__ if name not in ("messages", *body)}
    expected = {"fill_context": True, "include_stop_sequence": False} | row["params"]
    assert described(completion_params(completion_body(**body), CALL), "logprob_options") == expected
    for fields in (body, body | nulls):
        chat = chat_params(chat_body(**fields), CALL, keeps_marks=False)
        assert described(chat, "logprob_options") == expected | {"add_special_tokens": False}


@table("parameters", "openai chats")
def test_fields_of_chats(row: dict[str, Any]) -> None:
    plain_chat, tools = (chat_params(chat_body(**row["body"]), CALL, keeps_marks=parses) for parses in (False, True))
    assert {name: getattr(plain_chat, name) for name in row["params"]} == row["params"]
    assert tools.skip_special_tokens is False  # those around a call are read


@table("parameters", "openai logprobs")
def test_which_logprobs_are_asked_for(row: dict[str, Any]) -> None:
    expected = row["options"] | {"exact_top_n": True}
    assert plain(completion_params(completion_body(**row["completion"]), CALL).logprob_options) == expected
    if "chat" in row:
        assert plain(chat_params(chat_body(**row["chat"]), CALL, keeps_marks=False).logprob_options) == expected


@table("parameters", "openai formats")
def test_output_formats(row: dict[str, Any]) -> None:
    assert plain(completion_params(completion_body(**row["body"]), CALL).grammar) == row["grammar"]


async def check_refusal(path: str, body: dict[str, Any], row: dict[str, Any]) -> None:
    answer = await ask(path, body | row["body"], max_concurrent_requests=128)
    error = answer.body["error"]
    assert (answer.status, error["param"], error["type"]) == (400, row["field"], "invalid_request_error")
    assert error["message"] == row["text"]


@table("refusals", "chat")
@run_async
async def test_bad_chats_name_their_field(row: dict[str, Any]) -> None:
    await check_refusal(CHAT, USER, row)


@table("refusals", "completions")
@run_async
async def test_bad_completions_name_their_field(row: dict[str, Any]) -> None:
    await check_refusal(COMPLETIONS, {"prompt": "p"}, row)


@table("refusals", "responses")
@run_async
async def test_bad_responses_name_their_field(row: dict[str, Any]) -> None:
    await check_refusal("/v1/responses", {"input": "p"}, row)


@pytest.mark.parametrize("body", [b"{", {}, {"messages": "hello"}, USER | {"max_tokens": -2}, USER | {"n": 1.5}])
@run_async
async def test_bodies_of_the_wrong_types(body: Any) -> None:
    answer = await ask(CHAT, body)
    refusal = answer.status, answer.body["error"]["type"], answer.body["error_type"]
    assert refusal == (400, "invalid_request_error", "validation")


DEEP_TOOL = {"tools": [{"function": {"name": "x", "parameters": "DEEP"}}], "tool_choice": "required"}
DEEP_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "DEEP"}}]}
DEEP = [{"guided_json": "DEEP"}, {"chat_template_kwargs": "DEEP"}, DEEP_TOOL]


@pytest.mark.parametrize("fields", [*DEEP, {"messages": [DEEP_CALL, *USER["messages"]]}])
@pytest.mark.parametrize("as_text", [False, True])
@run_async
async def test_json_of_any_depth_is_answered_or_refused(fields: dict[str, Any], as_text: bool) -> None:
    """Some depths can be read and not written again."""
    for depth in [1, *range(900, 1000, 14), 5000]:
        value = '{"properties":' * depth + "{}" + "}" * depth
        body = json.dumps(USER | fields).replace('"DEEP"', json.dumps(value) if as_text else value)
        assert (await ask(CHAT, body.encode(), ANSWER)).status in (200, 400)


@run_async
async def test_calls_of_the_front_end() -> None:
    stop = {"temperature": 0, "stop": "</s>", "user": "me"}
    call = (await ask(CHAT, USER | stop | {"n": 2, "model": "m"}, ANSWER, output(index=1, reason="MAX_TOKENS"))).call
    assert (call.kind, call.texts, call.fields, call.n) == (CallKind.BATCH, ["p"], ["messages"], 2)
    assert (call.token_ids, call.adapter, call.api) == (None, None, "openai")
    assert call.params.sampling.stop_token_ids == (256,)  # a special token of the model
    call = (await ask(COMPLETIONS, {"prompt": [[1], [2, 3]], "stream": True}, limit_by_address=True)).call
    assert (call.kind, call.texts, call.token_ids) == (CallKind.STREAM, ["", ""], [[1], [2, 3]])
    assert (call.client, call.fields) == (b"127.0.0.1", ["prompt[0]", "prompt[1]"])


@table("parameters", "template messages")
def test_messages_for_a_template(row: dict[str, Any]) -> None:
    assert template_messages(chat_body(messages=[row["given"]]).messages) == [row["expected"]]


def test_tools_for_a_template() -> None:
    function = {"name": "w", "parameters": {}}
    body = chat_body(tools=[{"type": "function", "function": function | {"strict": True}}])
    assert template_tools(body.tools or ()) == [{"type": "function", "function": function}]


EMPTY: list[Any] = ["", " ", "null", None, "{}", {}]
NO_OBJECTS: list[Any] = ['{"a": ', "[1]", "7", '"a"', [1], 7, "NaN, or not", "[" * 9999]


ARGUMENTS: list[Any] = [(empty, {}) for empty in EMPTY] + [(value, {"a": 1}) for value in ('{"a": 1}', {"a": 1})]
ARGUMENTS += [(other, {"text": other}) for other in NO_OBJECTS]


@pytest.mark.parametrize(("given", "expected"), ARGUMENTS)
def test_arguments_of_earlier_calls_are_objects(given: Any, expected: dict[str, Any]) -> None:
    calls: Any = [{"function": {"name": "x", "arguments": given}}]
    (message,) = template_messages(chat_body(messages=[{"role": "assistant", "tool_calls": calls}]).messages)
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def read(reader: RequestReader, **fields: Any) -> tuple[CompletionRequest, int]:
    """The body, and how many of its fields are unknown."""
    counted: list[int] = []
    metrics = SimpleNamespace(requests=SimpleNamespace(unknown_fields=SimpleNamespace(inc=counted.append)))
    body = completion_body(**{name: fields[name] for name in fields if name in CompletionRequest.__struct_fields__})
    data = json.dumps({"prompt": "p"} | fields).encode()
    call: Any = SimpleNamespace(body=lambda *_, **__: body, data=data, generator=SimpleNamespace(metrics=metrics))
    return reader.read(call, CompletionRequest), sum(counted)


def test_unknown_fields_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = RequestReader({"mystery": 1})
    for _ in range(2):
        assert read(reader, user="me", mystery={"x": 1}, **{"no identifier\n": 2, "x" * 64: 3, "y" * 65: 4})[1] == 4
    known = ["mystery", "x" * 64]
    assert caplog.messages == [
        f"requests have the field {name}, which is unknown here and has no effect" for name in known
    ]
    assert read(reader, **{f"field_{number}": 1 for number in range(50_000)})[1] == 99  # looked at as far as 100
    assert len(caplog.messages) == 100


def test_the_model_has_defaults_of_sampling(caplog: pytest.LogCaptureFixture) -> None:
    body, _ = read(RequestReader({"temperature": "0", "top_k": -1, "top_p": 1, "min_p": 1, "other": 1}), temperature=3)
    assert (body.temperature, body.top_k, body.top_p, body.min_p, body.seed) == (3, -1, 1, 1, None)
    assert (read(RequestReader({"temperature": "0"}))[0].temperature, caplog.messages) == (0, [])
    for wrong in ({"temperature": -1}, {"top_k": -2}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 1.1}, {"min_p": -1}):
        body, _ = read(RequestReader(wrong | {"repetition_penalty": 2}))
        assert (body.repetition_penalty, "no sampling defaults" in caplog.messages.pop()) == (None, True)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@run_async
async def test_models_have_names(path: str) -> None:
    for name in (None, "", "tgi", "dummy", "a", "b", "org/m", "gpt-4", "M" * 99):
        status = 404 if name in ("gpt-4", "M" * 99) else 200
        body, served = USER | {"prompt": "p", "model": name}, ("a", "b")
        answer = await ask(path, body, ANSWER, model_name="org/m", served_model_name=served)
        assert (answer.status, answer.body.get("model")) == (status, "a" if status == 200 else None), name
        if status == 404:
            error = answer.body["error"]
            assert (error["message"], error["code"]) == (f"The model `{name:.40}` does not exist.", "model_not_found")


@run_async
async def test_limits_of_tgi_are_not_those_of_this_api() -> None:
    stops = [f"<{number}>" for number in range(100)]
    outputs = [output(index=index, reason="MAX_TOKENS") for index in range(20)]
    most = {"max_tokens": -1, "seed": 2**64 - 1, "truncate_prompt_tokens": 2**32 - 1}
    answer = await ask(COMPLETIONS, {"prompt": ["p"] * 20, "stop": stops, **most}, *outputs)
    assert (answer.status, len(answer.call.texts), len(answer.call.params.stop_sequences)) == (200, 20, 100)
    assert answer.call.params.fill_context
    for body, text in (({"prompt": ["p"] * 21}, "at most 20 prompts"), ({"stop": ["x" * 1000] * 17}, "16384 UTF8")):
        answer = await ask(COMPLETIONS, {"prompt": "p"} | body, max_concurrent_requests=20)
        assert (answer.status, text in answer.body["error"]["message"]) == (400, True)
