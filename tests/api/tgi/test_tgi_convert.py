"""From bodies of TGI's API to parameters and calls, and from outputs to answers, field by field."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from described_params import described
from harness import run_async
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_api import LIMITS, Answer, ask, token, whole

from tgis.api.http.errors import HttpError
from tgis.api.openai.chat_template import TemplateError
from tgis.api.tgi import convert
from tgis.api.tgi.errors import ERRORS
from tgis.api.tgi.schema import GenerateParameters
from tgis.config import Config
from tgis.errors import EngineFailure, InvalidRequest, OutOfMemory, Overloaded, RequestError, Unavailable
from tgis.frontend.calls import CallKind
from tgis.frontend.output import RequestOutput
from tgis.ipc.lookups import GrammarKind, GrammarSpec
from tgis.ipc.request import LogprobOptions, StopReason

CALL: Any = SimpleNamespace(
    config=Config(model_name="m"),
    generator=SimpleNamespace(server_info=SimpleNamespace(limits=LIMITS)),
    special_token_ids=lambda texts: (2,) if "</s>" in texts else (),
)


def given_parameters(**fields: Any) -> GenerateParameters:
    return msgspec.json.decode(msgspec.json.encode(fields), type=GenerateParameters)


JSON_SCHEMA = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"const":1}')


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"temperature": 1.0}, {}),  # does not sample
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.5, "seed": 3}, {"temperature": 0.5, "seed": 3}),
        ({"top_k": 2}, {"temperature": 1.0, "top_k": 2}),
        ({"top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5}),
        ({"typical_p": 0.25}, {"temperature": 1.0, "typical_p": 0.25}),
        (
            {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "watermark": True, "ignore_eos_token": True},
            {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "watermark": True, "ignore_eos": True},
        ),
        (
            {"max_new_tokens": 3, "truncate": 5, "stop": ["a"], "stop_sequences": ["</s>"]},
            {
                "max_new_tokens": 3,
                "truncate_input_tokens": 5,
                "stop_sequences": ("a", "</s>"),
                "stop_token_ids": (2,),
            },
        ),
        ({"grammar": {"type": "regex", "value": "a"}}, {"grammar": GrammarSpec(GrammarKind.REGEX, "a")}),
        ({"grammar": {"type": "json", "value": {"const": 1}}}, {"grammar": JSON_SCHEMA}),
        ({"grammar": {"type": "json_schema", "value": {"schema": {"const": 1}}}}, {"grammar": JSON_SCHEMA}),
    ],
)
def test_parameters(body: dict[str, Any], expected: dict[str, Any]) -> None:
    params = convert.params(given_parameters(**body), CALL, details=False)
    always = {"fill_context": True, "include_stop_sequence": True, "skip_special_tokens": True}
    assert described(params, "logprob_options") == always | expected
    assert (params.constraints.max_stop_sequences, params.constraints.max_stop_sequence_bytes) == (4, 1000)


@pytest.mark.parametrize(
    ("body", "details", "options"),
    [
        ({}, False, {}),
        ({}, True, {"generated_tokens": True, "logprobs": True}),
        ({"decoder_input_details": True}, False, {"input_tokens": True, "logprobs": True}),
        ({"top_n_tokens": 2}, True, {"generated_tokens": True, "logprobs": True, "top_n_tokens": 2}),
    ],
)
def test_which_details_are_asked_for(body: dict[str, Any], details: bool, options: dict[str, Any]) -> None:
    params = convert.params(given_parameters(**body), CALL, details=details)
    assert params.logprob_options == LogprobOptions(exact_top_n=True, **options)


@pytest.mark.parametrize(
    ("output", "given", "reason"),
    [
        (whole("a", 3, StopReason.EOS_TOKEN), {}, "eos_token"),
        (whole("a", 3, StopReason.STOP_SEQUENCE), {}, "stop_sequence"),
        (whole("a", 3, StopReason.EOS_TOKEN, tokens=[token("x")]), {"stop": ["x"]}, "stop_sequence"),  # a special token
        (whole("a", 3, StopReason.EOS_TOKEN), {"max_new_tokens": 3}, "length"),  # no more were possible
        (whole("a", 100, StopReason.EOS_TOKEN), {}, "length"),
        (whole("a", 195, StopReason.EOS_TOKEN), {"max_new_tokens": 500}, "length"),
        (whole("a", 3, StopReason.TIME_LIMIT), {}, "length"),
    ],
)
def test_finish_reasons(output: RequestOutput, given: dict[str, Any], reason: str) -> None:
    assert convert.finish_reason(output, 5, given_parameters(**given), LIMITS) == reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequest("a", "a must be 1", "2"), (422, "validation", "Input validation error: a must be 1, got 2")),
        (TemplateError("messages", "no"), (422, "template_error", "Template error: no")),
        (OutOfMemory("too large"), (424, "generation", "Request failed during generation: too large")),
        (EngineFailure("it broke"), (424, "generation", "it broke")),
        (Overloaded("8 inputs"), (429, "overloaded", "Model is overloaded")),
        (Unavailable("gone"), (503, "unavailable", "gone")),
        (HttpError(401, "no token"), (401, "unauthorized", "no token")),
        (HttpError(500, "x"), (500, "incomplete_generation", "Incomplete generation: x")),
    ],
)
def test_errors(error: RequestError, expected: tuple[int, str, str]) -> None:
    status, body = ERRORS.convert(error)
    assert (status, body.error_type, body.error) == expected


async def generate(*outputs: RequestOutput | Exception, path: str = "/generate", **parameters: Any) -> Answer:
    options = {"max_best_of": 3, "max_input_tokens": 160}
    return await ask(path, {"inputs": "hé", "parameters": parameters}, *outputs, **options)


def shown(text: str, token_id: int, logprob: float | None = -0.5, **more: Any) -> dict[str, Any]:
    return {"id": token_id, "text": text, "logprob": logprob} | more


A, B = token("a", -0.5, 1, ("b", -1.5), ("a", -0.5)), token("b", -0.1)
A_SHOWN, B_SHOWN = shown("a", 64, special=False), shown("b", 65, -0.1, special=False)
B_SECOND = shown("b", 65, -1.5, special=False)
DETAILS = {"finish_reason": "length", "generated_tokens": 2, "seed": None, "prefill": [], "tokens": [A_SHOWN, B_SHOWN]}


@pytest.mark.parametrize(
    ("parameters", "outputs", "expected"),
    [
        ({}, [whole("ab", 2, tokens=[A, B])], {"generated_text": "ab"}),
        ({"return_full_text": True}, [whole("ab", 2)], {"generated_text": "héab"}),
        ({"details": True}, [whole("ab", 2, seed=7, tokens=[A, B])], {"generated_text": "ab", "details": DETAILS}),
        (
            {"details": True, "do_sample": True},
            [whole("ab", 2, seed=7, tokens=[A, B])],
            {"generated_text": "ab", "details": DETAILS | {"seed": 7}},
        ),
        (
            {"decoder_input_details": True, "top_n_tokens": 2},
            [whole("a", 1, tokens=[A], input_tokens=[token("h", math.nan), token("b", -1.5)])],
            {
                "generated_text": "a",
                "details": DETAILS
                | {
                    "generated_tokens": 1,
                    "prefill": [shown("h", 71, None), shown("b", 65, -1.5)],
                    "tokens": [A_SHOWN],
                    "top_tokens": [[A_SHOWN, B_SECOND]],
                },
            },
        ),
        (
            {"best_of": 2, "do_sample": True, "details": True},
            [whole("a", 1, seed=1, tokens=[A]), whole("b", 1, seed=2, index=1, tokens=[B])],
            {
                "generated_text": "b",
                "details": DETAILS
                | {
                    "generated_tokens": 1,
                    "seed": 2,
                    "tokens": [B_SHOWN],
                    "best_of_sequences": [
                        {"generated_text": "a", **DETAILS, "generated_tokens": 1, "seed": 1, "tokens": [A_SHOWN]}
                    ],
                },
            },
        ),
    ],
    ids=["text", "full text", "details", "sampled", "prompt", "best of"],
)
@run_async
async def test_answers(parameters: Any, outputs: Any, expected: dict[str, Any]) -> None:
    answer = await generate(*outputs, **({"max_new_tokens": outputs[0].generated_token_count} | parameters))
    assert answer.body == expected
    numbers = [answer.headers[f"x-{name}"] for name in ("compute-characters", "prompt-tokens", "generated-tokens")]
    assert numbers == ["2", "5", str(outputs[0].generated_token_count)]


@pytest.mark.parametrize(
    ("parameters", "last", "expected"),
    [
        ({}, {}, {}),
        ({"return_full_text": True}, {"generated_text": "héab"}, {}),
        ({"top_n_tokens": 2}, {"top_tokens": []}, {"top_tokens": [A_SHOWN, B_SECOND]}),
        (
            {"details": True, "do_sample": True},
            {"details": {"finish_reason": "eos_token", "generated_tokens": 2, "seed": 7, "input_length": 5}},
            {},
        ),
    ],
)
@run_async
async def test_streams(parameters: Any, last: dict[str, Any], expected: dict[str, Any]) -> None:
    messages = [
        RequestOutput(input_token_count=5, seed=7),
        RequestOutput(text="a", generated_token_count=1, tokens=[A]),
        RequestOutput(text="b", generated_token_count=2, tokens=[B], stop_reason=StopReason.EOS_TOKEN, seed=7),
    ]
    plain = {"generated_text": None, "details": None}
    answer = await generate(*messages, path="/generate_stream", **parameters)
    assert answer.body == [
        {"index": 1, "token": A_SHOWN} | plain | expected,
        {"index": 2, "token": B_SHOWN} | plain | {"generated_text": "ab"} | last,
    ]


@run_async
async def test_an_end_without_a_token_repeats_the_last() -> None:
    first = RequestOutput(text="a", generated_token_count=1, tokens=[A])
    end = RequestOutput(generated_token_count=1, stop_reason=StopReason.TIME_LIMIT)
    answer = await generate(first, end, path="/generate_stream")
    assert [event["token"] for event in answer.body] == [A_SHOWN, A_SHOWN]
    assert answer.body[-1]["generated_text"] == "a"


@run_async
async def test_a_failure_is_a_status_or_the_last_event() -> None:
    failure = EngineFailure("Request failed during generation: it broke")
    error = {"error": str(failure), "error_type": "generation"}
    for path in ("/generate", "/generate_stream"):
        assert (await generate(failure, path=path))[::2] == (424, error)
    first = RequestOutput(text="a", generated_token_count=1, tokens=[A])
    answer = await generate(first, failure, path="/generate_stream")
    assert (answer.status, answer.body[1:]) == (200, [error])
    answer = await generate(Overloaded("8 inputs"))
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")


@run_async
async def test_the_root_route_and_invocations_answer_as_clients_expect() -> None:
    body = {"inputs": "hé", "parameters": {"max_new_tokens": 2}}
    for path in ("/", "/invocations"):
        assert (await ask(path, body, whole("ab", 2))).body == [{"generated_text": "héab"}]
        last = RequestOutput(text="ab", generated_token_count=2, tokens=[B], stop_reason=StopReason.EOS_TOKEN)
        (event,) = (await ask(path, body | {"stream": True}, last)).body
        assert event["generated_text"] == "héab"
    body["parameters"] = {"return_full_text": False}
    assert (await ask("/", body, whole("ab", 2))).body == [{"generated_text": "ab"}]
    assert (await ask("/invocations", {"prompt": "a"}, whole("ab", 2))).body["object"] == "text_completion"
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert (await ask("/invocations", chat, whole("ab", 2))).body["object"] == "chat.completion"
    assert (await ask("/invocations", {})).status == 422


@run_async
async def test_calls_of_the_front_end() -> None:
    call = (await generate(whole(), whole(index=1), best_of=2, do_sample=True, adapter_id="l")).call
    assert call is not None
    assert (call.kind, call.texts, call.fields, call.n) == (CallKind.BATCH, ["hé"], ["inputs"], 2)
    assert (call.adapter, call.api) == (("adapter_id", "l"), "tgi")
    call = (await ask("/generate", {"inputs": "a"}, whole())).call
    assert call is not None
    assert (call.kind, call.params.sampling.temperature) == (CallKind.SINGLE, 1.0)  # it samples without parameters


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"best_of": 4, "do_sample": True}, "`best_of` must be > 0 and <= 3. Given: 4"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "temperature": 1.0, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"stop": ["a"] * 5}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"seed": 2**64}, "`seed` must be <= 18446744073709551615"),
        ({"truncate": 200}, "`truncate` must be > 0 and <= 199. Given: 200"),
        ({"max_new_tokens": 101}, "max_new_tokens must be <= 100, got 101"),
        ({"top_n_tokens": 11}, "top_n_tokens must be <= 10, got 11"),
        ({"temperature": 0}, "Expected `float` > 0.0 - at `$.parameters.temperature`"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.0}, "top_p"),
        ({"typical_p": 1}, "typical_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"stop": [""]}, "parameters.stop"),
        ({"stop": "a"}, "stop"),
        ({"seed": -1}, "seed"),
        ({"truncate": 0}, "truncate"),
        ({"details": None}, "details"),
        ({"grammar": {"type": "secret", "value": ""}}, "Invalid enum value - at `$.parameters.grammar.type`"),
        ({"grammar": {"type": "regex", "value": {}}}, "grammar.regex must be a text"),
        ({"grammar": {"type": "json_schema", "value": {"name": "x"}}}, "grammar.json_schema must have a schema"),
    ],
)
@run_async
async def test_invalid_requests_are_422(parameters: dict[str, Any], words: str) -> None:
    for path in ("/generate", "/generate_stream"):
        if path == "/generate_stream" and "best_of" in parameters:
            words = "`best_of` != 1 is not supported when streaming tokens"
        answer = await generate(whole(), path=path, **parameters)
        assert (answer.status, answer.body["error_type"]) == (422, "validation")
        assert answer.body["error"].startswith("Input validation error: ")
        assert words in answer.body["error"]


GRAMMAR = b'{"inputs": "a", "parameters": {"grammar": {"type": "json", "value": '


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"inputs": "\xff"}', 400),
        (b"[" * 50_000, 422),
        (b"{}", 422),
        (b'{"inputs": ""}', 422),
        (b'{"inputs": 1}', 422),
        (b'{"inputs": "a", "parameters": null}', 422),
        (GRAMMAR + b"[" * 40_000, 400),
        (GRAMMAR + b'{"a": "\xff"}}}}', 400),
        (b'{"inputs": "a", "unknown": [1], "parameters": {"other": {}, "max_new_tokens": 1}}', 200),
    ],
)
@run_async
async def test_bodies(body: bytes, status: int) -> None:
    answer = await ask("/generate", body, whole("a"))
    assert answer.status == status
    assert status == 200 or answer.body["error_type"] == "validation"


@given(
    value=st.floats(width=32, min_value=-1024, max_value=-(2**-100)),
    share=st.sampled_from([0, 0.4999999, 0.5, 0.5000001]),
)
@example(value=-0.3, share=0.5)
def test_numbers_are_the_shortest_of_single_precision(value: float, share: float) -> None:
    """Those between two of them, too: numpy says which."""
    between = value + share * float(np.spacing(np.float32(value)))
    assert convert.json_float(between) == float(str(np.float32(between)))
