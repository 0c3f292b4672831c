"""From bodies of TGI's API to parameters and calls, and from outputs to answers, field by field."""

from typing import Any

import msgspec
import numpy as np
import pytest
import tables
from described_params import described, plain
from harness import run_async
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_api import CALL, LIMITS, Answer, ScriptedGenerator, ask, output
from tables import table

from tgis.api.tgi import convert
from tgis.api.tgi.errors import ERRORS
from tgis.api.tgi.schema import GenerateParameters, Token
from tgis.errors import EngineFailure, Overloaded
from tgis.frontend.calls import CallKind
from tgis.frontend.output import RequestOutput


def given_parameters(**fields: Any) -> GenerateParameters:
    return msgspec.json.decode(msgspec.json.encode(fields), type=GenerateParameters)


@table("parameters", "tgi")
def test_parameters(row: dict[str, Any]) -> None:
    params = convert.params(given_parameters(**row["body"]), CALL, details=False)
    always = {"fill_context": True, "include_stop_sequence": True, "skip_special_tokens": True}
    assert described(params, "logprob_options") == always | row["params"]
    assert (params.constraints.max_stop_sequences, params.constraints.max_stop_sequence_bytes) == (4, 1000)


@table("parameters", "tgi details")
def test_which_details_are_asked_for(row: dict[str, Any]) -> None:
    params = convert.params(given_parameters(**row["body"]), CALL, details=row["details"])
    assert plain(params.logprob_options) == row["options"] | {"exact_top_n": True}


@table("answers", "tgi finish reasons")
def test_finish_reasons(row: dict[str, Any]) -> None:
    made, given = output(**row["output"]), given_parameters(**row["parameters"])
    assert convert.finish_reason(made, 5, given, LIMITS) == row["reason"]


@table("errors", "errors")
def test_errors(row: dict[str, Any]) -> None:
    status, body = ERRORS.convert(tables.error(row))
    assert {"status": status, "error_type": body.error_type, "error": body.error} == row["tgi"]


AB = output("ab", "MAX_TOKENS", generated_token_count=2)
FIRST_TOKEN = output("a", generated_token_count=1, tokens=[("a", -0.5, 1, ("b", -1.5), ("a", -0.5))])
LAST_TOKEN = output("b", "EOS_TOKEN", generated_token_count=2, tokens=[("b", -0.1)], seed=7)


async def generate(*outputs: RequestOutput | Exception, path: str = "/generate", **parameters: Any) -> Answer:
    options = {"max_best_of": 3, "max_input_tokens": 160}
    return await ask(path, {"inputs": "hé", "parameters": parameters}, *outputs, **options)


@table("answers", "tgi")
@run_async
async def test_answers(row: dict[str, Any]) -> None:
    outputs = [output(**fields) for fields in row["outputs"]]
    count = outputs[0].generated_token_count
    answer = await generate(*outputs, **({"max_new_tokens": count} | row["parameters"]))
    assert answer.body == row["answer"]
    headers = [answer.headers[f"x-{name}"] for name in ("compute-characters", "prompt-tokens", "generated-tokens")]
    assert headers == ["2", "5", str(count)]


@table("answers", "streamed tgi")
@run_async
async def test_streams(row: dict[str, Any]) -> None:
    messages = [output(input_token_count=5, seed=7), FIRST_TOKEN, LAST_TOKEN]
    assert (await generate(*messages, path="/generate_stream", **row["parameters"])).body == row["events"]


@run_async
async def test_an_end_without_a_token_repeats_the_last() -> None:
    end = output(reason="TIME_LIMIT", generated_token_count=1)
    first, last = (await generate(FIRST_TOKEN, end, path="/generate_stream")).body
    assert (first["token"], last["generated_text"]) == (last["token"], "a")


@run_async
async def test_a_failure_is_a_status_or_the_last_event() -> None:
    failure = EngineFailure("Request failed during generation: it broke")
    error = {"error": str(failure), "error_type": "generation"}
    for path in ("/generate", "/generate_stream"):
        assert (await generate(failure, path=path))[::2] == (424, error)
    answer = await generate(FIRST_TOKEN, failure, path="/generate_stream")
    assert (answer.status, answer.body[1:]) == (200, [error])
    answer = await generate(Overloaded("8 inputs"))
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")


@run_async
async def test_the_root_route_and_invocations_answer_as_clients_expect() -> None:
    largest = {"seed": convert.MAX_SEED, "truncate": LIMITS.longest_input, "stop": [*"wxyz"]}
    body = {"inputs": "hé", "parameters": largest | {"max_new_tokens": 2}}
    for path in ("/", "/invocations"):
        assert (await ask(path, body, AB)).body == [{"generated_text": "héab"}]
        (event,) = (await ask(path, body | {"stream": True}, LAST_TOKEN)).body
        assert event["generated_text"] == "héb"
    body["parameters"] = {"return_full_text": False}
    assert (await ask("/", body, AB)).body == [{"generated_text": "ab"}]
    assert (await ask("/invocations", {"prompt": "a"}, AB)).body["object"] == "text_completion"
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert (await ask("/invocations", chat, AB)).body["object"] == "chat.completion"
    assert (await ask("/invocations", {})).status == 422


@run_async
async def test_calls_of_the_front_end() -> None:
    call = (await generate(AB, output(reason="MAX_TOKENS", index=1), best_of=2, do_sample=True, adapter_id="l")).call
    assert (call.kind, call.texts, call.fields, call.n) == (CallKind.BATCH, ["hé"], ["inputs"], 2)
    assert (call.adapter, call.api) == (("adapter_id", "l"), "tgi")
    assert call.params.logprob_options.logprobs  # the best has the highest mean
    call = (await ask("/generate", {"inputs": "a"}, AB)).call
    assert (call.kind, call.params.sampling.temperature) == (CallKind.SINGLE, 1.0)  # it samples without parameters


@table("refusals", "tgi")
@run_async
async def test_invalid_requests_are_422(row: dict[str, Any]) -> None:
    for path in ("/generate", "/generate_stream"):
        text = row["text"]
        if path == "/generate_stream" and "best_of" in row["parameters"]:
            text = "`best_of` != 1 is not supported when streaming tokens"
        answer = await generate(path=path, **row["parameters"])
        assert (answer.status, answer.body["error_type"]) == (422, "validation")
        assert answer.body["error"] == f"Input validation error: {text}"


def test_the_only_input_token_of_an_encoder_decoder_is_that_which_starts_the_decoder() -> None:
    generator = ScriptedGenerator([])
    generator.server_info.engine = msgspec.structs.replace(generator.server_info.engine, decoder_start_token_id=64)
    for wanted, tokens in ((True, [Token(64, "a", None)]), (False, [])):
        given = GenerateParameters(decoder_input_details=wanted)
        assert convert.details(output(reason="MAX_TOKENS"), given, generator).prefill == tokens


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
    answer = await ask("/generate", body, AB)
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
