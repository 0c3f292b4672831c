"""The gRPC API end to end: a server process with the fake engine, which repeats its prompt, and generated stubs."""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_calls import CONFIG, connected, make_calls, serving
from grpc_status import rpc_status
from harness import Server, as_stream_request, run_async, running_fake, unary_request, wait_until

from tgis.api.grpc.calls import GrpcCall
from tgis.errors import InvalidRequest
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

Stub = pb_grpc.GenerationServiceStub
MAX_LENGTH, MAX_NEW, MAX_INPUTS, MAX_TEXTS = 200, 169, 40, 10_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    steps = {"max_sequence_length": MAX_LENGTH, "step_seconds": 0.03, "poison_token": 0}
    options = {"MAX_NEW_TOKENS": MAX_NEW, "MAX_CONCURRENT_REQUESTS": MAX_INPUTS}
    with running_fake(tmp_path_factory.mktemp("service"), steps, **options) as running:
        yield running


@pytest.fixture(scope="module")
def partial_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"DEADLINE_PARTIAL": True, "LIMIT_BY_ADDRESS": True, "MAX_CONCURRENT_REQUESTS_PER_CLIENT": 2}
    with running_fake(tmp_path_factory.mktemp("partial"), {"step_seconds": 0.5}, **options) as running:
        yield running


@pytest.fixture
def stub(server: Server) -> Iterator[Stub]:
    with server.stub() as made:
        yield made


def test_an_idle_server_sleeps_and_wakes(server: Server) -> None:
    """Threads of gRPC's own wake up too, which nobody can change: only the event loop is counted."""
    status, lags = Path(f"/proc/{server.process.pid}/status"), "tgi_event_loop_lag_duration_count"

    def switches() -> int:
        return int(re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.MULTILINE)[0])

    def is_quiet() -> bool:
        before = switches()
        time.sleep(2.0)
        return switches() - before <= 2.0 * 30  # the loop looks at its lag 20 times a second

    wait_until(is_quiet, "two quiet seconds")
    observed = server.metric(lags)
    wait_until(lambda: server.metric(lags) > observed, "look at the event loop")


def test_an_answer_comes_shortly_before_its_deadline(partial_server: Server) -> None:
    with partial_server.stub() as stub:
        request = unary_request("ab", 500)
        (whole,) = stub.Generate(request, timeout=3).responses  # two steps before: a busy machine has 1 s
        assert whole.stop_reason == pb.TIME_LIMIT
        assert 0 < whole.generated_token_count <= 6
        assert whole.text == ("ab" * 50)[: whole.generated_token_count]
        with pytest.raises(grpc.RpcError) as caught:  # streams have sent their text
            list(stub.GenerateStream(as_stream_request(request), timeout=0.3))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        (whole,) = stub.Generate(unary_request("ab", 2)).responses  # without a deadline
    assert (whole.text, whole.stop_reason) == ("ab", pb.MAX_TOKENS)


def test_ids_of_tokens_if_asked_for(stub: Stub) -> None:
    """The fake model's ids are bytes in the order of GPT-2's characters for them, of which `!` is the first."""
    request = unary_request('"#$</s>', 4)
    request.params.response.CopyFrom(pb.ResponseOptions(generated_tokens=True, input_tokens=True, top_n_tokens=1))
    (without,) = stub.Generate(request).responses
    request.params.response.token_ids = True
    (whole,) = stub.Generate(request).responses
    expected = [('"', 1, False), ("#", 2, False), ("$", 3, False), ("</s>", 256, True)]
    for tokens in (whole.input_tokens, whole.tokens):
        assert [(token.text, token.id, token.special) for token in tokens] == expected
        assert [(top.text, top.id, top.special) for token in tokens for top in token.top_tokens] == expected
    _, second, *rest = stub.GenerateStream(as_stream_request(request))
    assert list(second.input_tokens) == list(whole.input_tokens)
    assert [token for message in rest for token in message.tokens] == list(whole.tokens)
    for token in (*whole.input_tokens, *whole.tokens):  # an old client gets the bytes that it has always got
        for named in (token, *token.top_tokens):
            named.ClearField("id")
            named.ClearField("special")
    assert whole.SerializeToString() == without.SerializeToString()


@pytest.mark.skipif(
    tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 76), reason="this grpcio keeps what is not read in a buffer"
)
@pytest.mark.parametrize("tokens", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_gathers_while_nobody_reads_comes_in_one_message_unless_tokens_are_asked_for(
    server: Server, tokens: bool
) -> None:
    request = unary_request("abcdefgh", MAX_NEW)
    request.params.response.generated_tokens = tokens
    before = server.metric("tgi_batch_generated_tokens_total")
    window = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]  # the server sends what is asked for
    with grpc.insecure_channel(server.target, options=window) as channel:
        messages = pb_grpc.GenerationServiceStub(channel).GenerateStream(as_stream_request(request), timeout=60)
        next(messages)
        server.wait_for_metric(f"tgi_batch_generated_tokens_total {before + MAX_NEW}")
        rest = list(messages)
    assert "".join(message.text for message in rest) == ("abcdefgh" * 22)[:MAX_NEW]
    assert rest[-1].generated_token_count == MAX_NEW
    assert len(rest) == MAX_NEW if tokens else len(rest) < 10


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("milliseconds", "most"), [(200, 60), (1, 1)])
def test_the_time_limit_cuts_with_partial_text(stub: Stub, streamed: bool, milliseconds: int, most: int) -> None:
    """The shortest one gives a token on an idle server."""
    request = unary_request("abcdefgh", MAX_NEW, min_new_tokens=MAX_NEW, time_limit_millis=milliseconds)
    started = time.monotonic()
    if streamed:
        *_, last = stub.GenerateStream(as_stream_request(request))
    else:
        (last,) = stub.Generate(request).responses
    assert time.monotonic() - started >= milliseconds / 1000
    assert last.stop_reason == pb.TIME_LIMIT
    assert 1 <= last.generated_token_count <= most


DECODING = pb.DecodingParameters
BAD = [  # of what TGIS has not: the other rules have golden cases
    (DECODING(frequency_penalty=2.5), "frequency_penalty must be >= -2.0 and <= 2.0", "2.5"),
    (DECODING(presence_penalty=math.nan), "presence_penalty must be >= -2.0 and <= 2.0", "nan"),
    (DECODING(logit_bias=dict.fromkeys(range(301), 1.0)), "logit_bias must have at most 300 tokens", "301"),
    (DECODING(logit_bias={1: 5.0, 4_000_000_000: 1.0}), "logit_bias must have token ids below 257", "4000000000"),
    (DECODING(logit_bias={1: 5.0, 2: -101.0}), "logit_bias must have biases from -100 to 100", "-101"),
    (DECODING(allowed_token_ids=range(1025)), "allowed_token_ids must have at most 1024 tokens", "1025"),
    (DECODING(allowed_token_ids=[9] * 100_000), "allowed_token_ids must have at most 1024 tokens", "10000"),
    (DECODING(allowed_token_ids=[1, 257]), "allowed_token_ids must have token ids below 257", "257"),
    (DECODING(bad_words=["a"] * 129), "bad_words must be at most 128", "129"),
    (DECODING(bad_words=["é" * 1000, "é" * 25]), "bad_words must have <= 2048 UTF8 bytes", "2050"),
]


@pytest.mark.parametrize(("decoding", "message", "value"), BAD)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_parameters_have_an_exact_message_and_name_their_field(
    stub: Stub, decoding: pb.DecodingParameters, message: str, value: str, streamed: bool
) -> None:
    request = unary_request("abc")
    request.params.decoding.CopyFrom(decoding)
    error = failure(
        lambda: list(stub.GenerateStream(as_stream_request(request))) if streamed else stub.Generate(request)
    )
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)
    (only,) = violations(error)
    assert only.field == "params.decoding." + message.partition(" ")[0]
    assert only.description == f"{message}, got {value}"


def test_ids_need_lists_of_tokens(stub: Stub) -> None:
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="abc")])
    request.params.response.token_ids = True
    error = failure(lambda: stub.Generate(request))
    assert error.details() == "must request input and/or generated tokens to request extra token detail"
    assert violation(error) == "params.response"


GRAMMARS = [  # and what the whole output matches
    ({"format": pb.DecodingParameters.JSON}, r"\{.*"),
    ({"json_schema": '{"enum": ["abc", 17]}'}, '"abc"|17'),
    ({"regex": "[ab]{3}c?"}, "[ab]{3}c?"),
]


@pytest.mark.parametrize(("decoding", "pattern"), GRAMMARS)
def test_an_output_follows_its_grammar(stub: Stub, decoding: dict[str, Any], pattern: str) -> None:
    request = unary_request("abc", 9)
    request.params.decoding.CopyFrom(pb.DecodingParameters(**decoding))
    (response,) = stub.Generate(request, timeout=20).responses
    assert re.fullmatch(pattern, response.text)
    streamed = [*stub.GenerateStream(as_stream_request(request), timeout=20)]
    assert "".join(message.text for message in streamed) == response.text
    assert streamed[-1].stop_reason == response.stop_reason


@pytest.mark.slow
def test_a_grammar_that_is_forgotten_is_compiled_again(stub: Stub) -> None:
    for number in [*range(70), 0]:
        request = unary_request("abc", 9)
        request.params.decoding.regex = f"a{number}"
        assert stub.Generate(request, timeout=20).responses[0].text == f"a{number}"


@pytest.mark.parametrize(("method", "most"), [("Generate", MAX_INPUTS), ("Tokenize", MAX_TEXTS)])
def test_too_many_inputs_for_any_time(stub: Stub, method: str, most: int) -> None:
    kind = pb.BatchedGenerationRequest if method == "Generate" else pb.BatchedTokenizeRequest
    for inputs, text in [
        (most + 1, f"requests has {most + 1} inputs, at most {most} allowed"),
        (2 << 20, f"the message has more than {2048 + 2 * most} fields, which is enough for {most} inputs"),
    ]:
        empty = kind(requests=[{}]).SerializeToString()
        send = getattr(stub, method)
        error = failure(lambda: send(kind.FromString(empty * inputs)))  # noqa: B023
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)
        assert violation(error) == "requests"


@pytest.mark.parametrize(
    ("num_tokens", "message"),
    [
        (2 * MAX_LENGTH, f"input tokens ({2 * MAX_LENGTH}) plus prefix length (0) must be < {MAX_LENGTH}"),
        # The longest token of the fake model has 4 bytes.
        (20 * MAX_LENGTH, f"requests[0].text has {20 * MAX_LENGTH} bytes, at most {4 * MAX_LENGTH} fit into any input"),
    ],
)
def test_a_text_that_is_too_long_is_refused_and_may_be_truncated(stub: Stub, num_tokens: int, message: str) -> None:
    error = failure(lambda: stub.Generate(unary_request("x" * num_tokens)))
    assert (error.code(), violation(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "requests[0].text")
    assert error.details() == message
    truncated = unary_request("x" * num_tokens + "ab", 4)
    truncated.params.truncate_input_tokens = 2
    assert stub.Generate(truncated).responses[0].text == "abab"


def test_an_address_may_have_so_many_inputs(partial_server: Server) -> None:
    three = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="ab")] * 3)
    with partial_server.stub() as stub:
        error = failure(lambda: stub.Generate(three))
        assert error.details() == "requests has 3 inputs, at most 2 allowed"
        streams = [stub.GenerateStream(as_stream_request(unary_request("ab", 500))) for _ in range(2)]
        for stream in streams:
            next(stream)
        error = failure(lambda: stub.Generate(unary_request("ab", 1)))
        for stream in streams:
            stream.cancel()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    quota = error_details_pb2.QuotaFailure()
    assert rpc_status.from_call(error).details[1].Unpack(quota)
    assert "2 inputs in flight of this client, at most 2 allowed" in quota.violations[0].description


def test_overload_is_checked_before_validation_and_says_when_to_retry(stub: Stub) -> None:
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")] * MAX_INPUTS)
    request.params.stopping.max_new_tokens = MAX_NEW
    invalid = unary_request("a", 9999)
    while True:  # until it comes while the other runs
        running = stub.Generate.future(request)
        while (error := failure(lambda: stub.Generate(invalid))).code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            if running.done():
                break
        else:
            break
    assert error.details() == "Model is overloaded"
    retry, quota = error_details_pb2.RetryInfo(), error_details_pb2.QuotaFailure()
    first, second = rpc_status.from_call(error).details
    assert first.Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() > 0
    assert second.Unpack(quota)
    assert f"at most {MAX_INPUTS} allowed" in quota.violations[0].description


def test_one_bad_input_fails_its_whole_call_at_once(server: Server, stub: Stub) -> None:
    cancelled, generated = 'tgi_request_failure{err="cancelled"}', "tgi_batch_generated_tokens_total"
    server.wait_for_metric("tgi_batch_current_size 0.0")  # what other tests have cancelled is counted
    before = server.metrics(cancelled, generated)
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in ("abc", "!", "def")])
    request.params.stopping.max_new_tokens = MAX_NEW
    assert failure(lambda: stub.Generate(request)).code() is grpc.StatusCode.INTERNAL
    server.wait_for_metric("tgi_batch_current_size 0.0")
    failed, tokens = (new - old for new, old in zip(server.metrics(cancelled, generated), before, strict=True))
    assert (failed, tokens < 2 * MAX_NEW) == (2, True)


def failure(action: Callable[[], object]) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        action()
    return caught.value


def violation(error: Any) -> str:
    """The field named in the status details."""
    (only,) = violations(error)
    return str(only.field)


def violations(error: Any) -> list[error_details_pb2.BadRequest.FieldViolation]:
    bad = error_details_pb2.BadRequest()
    assert rpc_status.from_call(error).details[0].Unpack(bad)
    return list(bad.field_violations)


@run_async
async def test_a_status_fits_the_trailers_however_long_its_text_is() -> None:
    async def refuse(_data: bytes, _call: GrpcCall) -> None:
        raise InvalidRequest("text", "ä" * 20_000)

    calls = make_calls(CONFIG)
    methods = grpc.method_handlers_generic_handler("test.Service", {"Refuse": calls.handler("Refuse", refuse)})
    async with serving(methods) as (_, port), connected(port) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/test.Service/Refuse", bytes, bytes)(b"")
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.fullmatch(r"ä+ \.\.\.", error.details())
    assert [name for name, _ in error.trailing_metadata()] == ["grpc-status-details-bin"]


@run_async
async def test_a_call_that_reads_from_a_stopped_server_is_no_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    begun, stopped, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def read_late(call: GrpcCall) -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(100)
        await stopped.wait()
        try:
            await call.read()
        finally:
            ended.set()

    calls = make_calls(CONFIG)
    handler = calls.stream_handler("Late", read_late)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Late": handler}),))
    port = server.add_insecure_port("localhost:0")
    await server.start()
    async with connected(port) as channel:
        call = channel.stream_unary("/test.Service/Late", bytes, bytes)(iter([b""]))
        await begun.wait()
        await server.stop(0)
        stopped.set()
        with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
            await call
        await ended.wait()
        await asyncio.sleep(0.05)
    assert "internal error" not in caplog.text
