"""The gRPC API end to end: a server process with the fake engine, which repeats its prompt, and generated stubs."""

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from harness import Server, as_stream_request, run_async, running_server, unary_request
from raw_http2 import HELLO_WITHOUT_WINDOW, call_frames

from demo.fake_model import make_fake_model
from tgis.api.grpc.status import error_boundary
from tgis.errors import InvalidRequest
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

Stub = pb_grpc.GenerationServiceStub
MAX_LENGTH, MAX_NEW, MAX_INPUTS, MAX_TEXTS = 200, 169, 40, 10_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("service")
    model = make_fake_model(directory / "model", MAX_LENGTH, step_seconds=0.03, poison_token=0)
    options = {"MAX_NEW_TOKENS": MAX_NEW, "MAX_CONCURRENT_REQUESTS": MAX_INPUTS}
    options["MAX_CALL_MEMORY_MB"] = 128
    with running_server(directory, model, DEPLOYMENT_FRAMEWORK="fake", **options) as running:
        yield running


@pytest.fixture(scope="module")
def partial_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("partial")
    model = make_fake_model(directory / "model", step_seconds=1.0)
    options: dict[str, Any] = {"DEADLINE_PARTIAL": "true", "LIMIT_BY_ADDRESS": "true"}
    options["MAX_CONCURRENT_REQUESTS_PER_CLIENT"] = 2
    with running_server(directory, model, DEPLOYMENT_FRAMEWORK="fake", **options) as running:
        yield running


@pytest.fixture
def stub(server: Server) -> Iterator[Stub]:
    with server.stub() as made:
        yield made


def one(stub: Stub, request: pb.BatchedGenerationRequest) -> pb.GenerationResponse:
    """The only response; the stream of the same request must agree with it."""
    whole: pb.GenerationResponse
    (whole,) = stub.Generate(request, timeout=20).responses
    parts = list(stub.GenerateStream(as_stream_request(request), timeout=20))
    assert "".join(part.text for part in parts) == whole.text
    assert parts[0].input_token_count == whole.input_token_count
    assert [token for part in parts for token in part.tokens] == list(whole.tokens)
    last = parts[-1]
    assert (last.stop_reason, last.generated_token_count) == (whole.stop_reason, whole.generated_token_count)
    assert last.stop_sequence == whole.stop_sequence
    return whole


def test_defaults_are_twenty_greedy_tokens(stub: Stub) -> None:
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="hello ")])
    whole = one(stub, request)
    assert (whole.text, whole.generated_token_count) == ("hello hello hello he", 20)
    assert (whole.input_token_count, whole.stop_reason, whole.seed) == (6, pb.MAX_TOKENS, 0)


def test_an_answer_comes_shortly_before_its_deadline(partial_server: Server) -> None:
    with partial_server.stub() as stub:
        request = unary_request("ab", 500)
        (whole,) = stub.Generate(request, timeout=6).responses  # two steps before: a busy machine has 2 s
        assert whole.stop_reason == pb.TIME_LIMIT
        assert 0 < whole.generated_token_count <= 6
        assert whole.text == ("ab" * 50)[: whole.generated_token_count]
        with pytest.raises(grpc.RpcError) as caught:  # streams have sent their text
            list(stub.GenerateStream(as_stream_request(request), timeout=0.5))
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_call_without_deadline_goes_on(partial_server: Server) -> None:
    with partial_server.stub() as stub:
        (whole,) = stub.Generate(unary_request("ab", 2)).responses
    assert (whole.text, whole.stop_reason) == ("ab", pb.MAX_TOKENS)


def test_no_inputs_give_no_outputs(stub: Stub) -> None:
    assert stub.Generate(pb.BatchedGenerationRequest()) == pb.BatchedGenerationResponse()


def test_a_batch_returns_outputs_in_the_order_of_its_inputs(stub: Stub) -> None:
    texts = ["a", "bcd", "efghijk", "lm"]
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in texts])
    responses = stub.Generate(request, timeout=20).responses
    assert [r.text for r in responses] == [(text * 20)[:20] for text in texts]


@pytest.mark.parametrize(
    ("include", "text"), [(True, "one two threeone t"), (False, "one two threeone"), (None, "one two threeone t")]
)
def test_a_stop_sequence_cuts_the_text(stub: Stub, include: bool | None, text: str) -> None:
    request = unary_request(
        "one two three", 30, stop_sequences=["xyz", " t"], include_stop_sequence=include, min_new_tokens=10
    )
    whole = one(stub, request)
    assert (whole.text, whole.stop_reason, whole.stop_sequence) == (text, pb.STOP_SEQUENCE, " t")
    assert whole.generated_token_count == len("one two threeone t")


def test_a_stop_sequence_on_the_last_token_is_max_tokens(stub: Stub) -> None:
    whole = one(stub, unary_request("abcdef", 6, stop_sequences=["ef"], include_stop_sequence=False))
    assert (whole.text, whole.stop_reason, whole.stop_sequence) == ("abcdef", pb.MAX_TOKENS, "")


def test_eos_ends_and_is_counted_but_not_shown(stub: Stub) -> None:
    whole = one(stub, unary_request("ab</s>cd", 30))
    assert (whole.text, whole.stop_reason, whole.generated_token_count) == ("ab", pb.EOS_TOKEN, 3)


def test_output_limited_by_the_sequence_length_ends_with_token_limit(stub: Stub) -> None:
    whole = one(stub, unary_request("x" * 190, 100))
    assert (whole.generated_token_count, whole.stop_reason) == (10, pb.TOKEN_LIMIT)


def test_characters_are_never_split(stub: Stub) -> None:
    text = "a👩‍👩‍👧é🇩🇪한글"
    request = unary_request(text, 60)
    parts = list(stub.GenerateStream(as_stream_request(request)))
    assert "".join(part.text for part in parts) == (text * 3).encode()[:60].decode(errors="ignore")
    assert not any("\N{REPLACEMENT CHARACTER}" in part.text or part.text.startswith("\u200d") for part in parts)


def test_truncation_keeps_the_end_and_echo_shows_all(stub: Stub) -> None:
    request = unary_request("abcdefgh", 4)
    request.params.truncate_input_tokens = 3
    request.params.response.input_text = True
    whole = one(stub, request)
    assert (whole.text, whole.input_token_count) == ("abcdefgh" + "fghf", 3)


def test_token_details(stub: Stub) -> None:
    request = unary_request("hé", 2)
    options = pb.ResponseOptions(
        generated_tokens=True, input_tokens=True, token_logprobs=True, token_ranks=True, top_n_tokens=2
    )
    request.params.response.CopyFrom(options)
    (whole,) = stub.Generate(request).responses
    assert [t.text for t in whole.input_tokens] == ["h", "Ã", "©"]
    assert [(t.text, t.logprob, t.rank, len(t.top_tokens)) for t in whole.tokens] == [
        ("h", -0.5, 1, 2),
        ("Ã", -0.5, 1, 2),
    ]
    first, second, *_ = stub.GenerateStream(as_stream_request(request))
    assert (first.input_token_count, first.text, list(first.input_tokens)) == (3, "", [])
    assert list(second.input_tokens) == list(whole.input_tokens)


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


def test_a_stream_starts_before_the_first_token(stub: Stub) -> None:
    request = unary_request("abc", 5)
    request.params.method = pb.SAMPLE
    request.params.sampling.seed = 2**64 - 1
    request.params.response.input_text = True
    first, *rest = stub.GenerateStream(as_stream_request(request))
    assert first == pb.GenerationResponse(input_token_count=3, text="abc", seed=2**64 - 1)
    assert [part.seed for part in rest[:-1]] == [0] * (len(rest) - 1)
    assert rest[-1].seed == 2**64 - 1


@pytest.mark.parametrize("tokens", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_gathers_while_nobody_reads_comes_in_one_message_unless_tokens_are_asked_for(
    server: Server, tokens: bool
) -> None:
    request = unary_request("abcdefgh", MAX_NEW)
    request.params.response.generated_tokens = tokens
    before = gauge(server, "tgi_batch_generated_tokens_total")
    window = [("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)]  # the server sends what is asked for
    with grpc.insecure_channel(server.target, options=window) as channel:
        messages = pb_grpc.GenerationServiceStub(channel).GenerateStream(as_stream_request(request), timeout=60)
        next(messages)
        wait_until(lambda: gauge(server, "tgi_batch_generated_tokens_total") == before + MAX_NEW)
        rest = list(messages)
    assert "".join(message.text for message in rest) == ("abcdefgh" * 22)[:MAX_NEW]
    assert rest[-1].generated_token_count == MAX_NEW
    assert len(rest) == MAX_NEW if tokens else len(rest) < 10


def test_seeds_are_drawn_per_input_unless_given(stub: Stub) -> None:
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="abc")] * 5)
    request.params.method = pb.SAMPLE
    drawn = [r.seed for r in stub.Generate(request).responses]
    assert len(set(drawn)) == 5
    assert all(0 <= seed < 2**32 for seed in drawn)
    request.params.sampling.seed = 7
    assert [r.seed for r in stub.Generate(request).responses] == [7] * 5


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


def test_tokenize(stub: Stub) -> None:
    request = pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text="aé"), pb.TokenizeRequest(text="")], return_tokens=True, return_offsets=True
    )
    first, second = stub.Tokenize(request).responses
    assert (first.token_count, list(first.tokens)) == (3, ["a", "Ã", "©"])
    assert [(o.start, o.end) for o in first.offsets] == [(0, 1), (1, 3), (1, 3)]
    assert second == pb.TokenizeResponse()
    request.truncate_input_tokens = 1
    assert [list(r.tokens) for r in stub.Tokenize(request).responses] == [["©"], []]


def test_model_info(stub: Stub) -> None:
    info = stub.ModelInfo(pb.ModelInfoRequest(model_id="any"))
    assert (info.model_kind, info.max_sequence_length, info.max_new_tokens) == (
        pb.ModelInfoResponse.DECODER_ONLY,
        MAX_LENGTH,
        MAX_NEW,
    )


def params(**groups: Any) -> pb.Parameters:
    return pb.Parameters(method=pb.SAMPLE, **groups)


sampling, stopping, decoding, response = (
    pb.SamplingParameters,
    pb.StoppingCriteria,
    pb.DecodingParameters,
    pb.ResponseOptions,
)
nan, inf = math.nan, math.inf
STOPS = "can specify at most 6 non-empty stop sequences, each not more than 240 UTF8 bytes"
DECAY = "length_penalty must be >= 1.0 and <= 10.0"
LOW = decoding.LengthPenalty(start_index=3)
# parameters, field, the whole message (TGIS's, if TGIS refuses them too), what the status details add to it
BAD = {
    "temperature-low": (sampling(temperature=0.02), "temperature", "temperature must be >= 0.05", ", got 0.02"),
    "temperature-nan": (sampling(temperature=nan), "temperature", "temperature must be finite", ", got nan"),
    "top-p-high": (sampling(top_p=1.5), "top_p", "top_p must be > 0.0 and <= 1.0", ", got 1.5"),
    "top-p-nan": (sampling(top_p=nan), "top_p", "top_p must be finite", ", got nan"),
    "typical-p-high": (sampling(typical_p=1.25), "typical_p", "typical_p must be <= 1.0", ", got 1.25"),
    "typical-p-negative": (sampling(typical_p=-0.25), "typical_p", "typical_p must be >= 0.0", ", got -0.25"),
    "typical-p-nan": (sampling(typical_p=nan), "typical_p", "typical_p must be finite", ", got nan"),
    "top-k-high": (sampling(top_k=2**31), "top_k", "top_k must be strictly positive", ", got 2147483648"),
    "max-new": (stopping(max_new_tokens=170), "max_new_tokens", "max_new_tokens must be <= 169", ", got 170"),
    "min-above-max": (
        stopping(min_new_tokens=30),
        "min_new_tokens",
        "min_new_tokens must be <= max_new_tokens",
        ", got 30 and 20",
    ),
    "repetition-negative": (
        decoding(repetition_penalty=-2),
        "repetition_penalty",
        "repetition_penalty must be > 0.0",
        ", got -2",
    ),
    "repetition-nan": (
        decoding(repetition_penalty=nan),
        "repetition_penalty",
        "repetition_penalty must be finite",
        ", got nan",
    ),
    "length-penalty-unset": (decoding(length_penalty=LOW), "length_penalty.decay_factor", DECAY, ", got 0"),
    "frequency-high": (
        decoding(frequency_penalty=2.5),
        "frequency_penalty",
        "frequency_penalty must be >= -2.0 and <= 2.0",
        ", got 2.5",
    ),
    "presence-nan": (
        decoding(presence_penalty=nan),
        "presence_penalty",
        "presence_penalty must be >= -2.0 and <= 2.0",
        ", got nan",
    ),
    "many-biases": (
        decoding(logit_bias=dict.fromkeys(range(301), 1.0)),
        "logit_bias",
        "logit_bias must have at most 300 tokens",
        ", got 301",
    ),
    "bias-of-no-token": (
        decoding(logit_bias={1: 5.0, 4_000_000_000: 1.0}),
        "logit_bias",
        "logit_bias must have token ids below 257",
        ", got 4000000000",
    ),
    "bias-high": (
        decoding(logit_bias={1: 5.0, 2: -101.0}),
        "logit_bias",
        "logit_bias must have biases from -100 to 100",
        ", got -101",
    ),
    "seven-stops": (stopping(stop_sequences="abcdefg"), "stop_sequences", STOPS, ""),
    "empty-stop": (stopping(stop_sequences=["a", ""]), "stop_sequences", STOPS, ""),
    "long-stop": (stopping(stop_sequences=["é" * 121]), "stop_sequences", STOPS, ""),
    "details-without-lists": (
        response(token_ranks=True),
        "",
        "must request input and/or generated tokens to request extra token detail",
        "",
    ),
    "ids-without-lists": (
        response(token_ids=True),
        "",
        "must request input and/or generated tokens to request extra token detail",
        "",
    ),
    "top-n-high": (
        response(generated_tokens=True, top_n_tokens=11),
        "top_n_tokens",
        "top_n_tokens must be <= 10",
        ", got 11",
    ),
}
SECTIONS = {sampling: "sampling", stopping: "stopping", decoding: "decoding", response: "response"}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_parameters_have_an_exact_message_and_name_their_field(stub: Stub, name: str, streamed: bool) -> None:
    part, field, message, added = BAD[name]
    section = SECTIONS[type(part)]
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="abc")], params=params(**{section: part}))
    error = failure(
        lambda: list(stub.GenerateStream(as_stream_request(request))) if streamed else stub.Generate(request)
    )
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)
    (only,) = violations(error)
    assert (only.field, only.description) == (f"params.{section}.{field}".rstrip("."), message + added)


BAD_INPUTS = {
    "too-long": (
        unary_request("x" * 200, 1),
        "requests[0].text",
        "input tokens (200) plus prefix length (0) must be < 200",
    ),
    "no-room-for-minimum": (
        unary_request("x" * 69, 160, min_new_tokens=150),
        "requests[0].text",
        "plus min_new_tokens (150) must be <= 200",
    ),
    "no-token": (unary_request("", 1), "requests[0].text", "gives no token"),
    "prefix": (
        pb.BatchedGenerationRequest(requests=unary_request("a").requests, prefix_id="p"),
        "prefix_id",
        "no adapter store",
    ),
    "adapter": (
        pb.BatchedGenerationRequest(requests=unary_request("a").requests, adapter_id="a"),
        "adapter_id",
        "no adapter store",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs_name_their_field(stub: Stub, name: str) -> None:
    request, field, text = BAD_INPUTS[name]
    error = failure(lambda: stub.Generate(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in error.details()
    assert violation(error) == field


GRAMMARS = [  # and what the whole output matches
    ({"format": pb.DecodingParameters.TEXT}, "abcabcabc"),
    ({"format": pb.DecodingParameters.JSON}, r"\{.*"),
    ({"json_schema": '{"enum": ["abc", 17]}'}, '"abc"|17'),
    ({"regex": "[ab]{3}c?"}, "[ab]{3}c?"),
    ({"choice": pb.DecodingParameters.StringChoices(choices=["abd", "abx"])}, "ab[dx]"),
    ({"grammar": 'root ::= "a" x\nx ::= "y" | x "z"'}, "ayz*"),
    ({"grammar": 'start: "a" /[xy]/'}, "a[xy]"),
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


def test_a_stream_needs_a_request(stub: Stub) -> None:
    error = failure(lambda: list(stub.GenerateStream(pb.SingleGenerationRequest())))
    assert (error.code(), violation(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "request")


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize", "ModelInfo"])
def test_undecodable_bytes_are_an_invalid_argument(server: Server, method: str) -> None:
    with grpc.insecure_channel(server.target) as channel:
        kind = channel.unary_stream if method == "GenerateStream" else channel.unary_unary
        send = kind(f"/fmaas.GenerationService/{method}", None, None)
        error = failure(lambda: list(send(b"\xff\xff\xff")) if method == "GenerateStream" else send(b"\xff\xff\xff"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("method", "most"), [("Generate", MAX_INPUTS), ("Tokenize", MAX_TEXTS)])
def test_too_many_inputs_for_any_time(stub: Stub, method: str, most: int) -> None:
    kind = pb.BatchedGenerationRequest if method == "Generate" else pb.BatchedTokenizeRequest
    for inputs, text in [
        (most + 1, f"requests has {most + 1} inputs, at most {most} allowed"),
        (2 << 20, f"the message has more than {1024 + 2 * most} fields, which is enough for {most} inputs"),
    ]:
        empty = kind(requests=[{}]).SerializeToString()
        send = getattr(stub, method)
        error = failure(lambda: send(kind.FromString(empty * inputs)))  # noqa: B023
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)
        assert violation(error) == "requests"


def test_a_text_that_is_too_long_is_refused_by_its_tokens_or_its_bytes(stub: Stub) -> None:
    most = MAX_LENGTH * len("</s>")  # the longest token
    error = failure(lambda: stub.Generate(unary_request("x" * most)))
    assert error.details() == f"input tokens ({most}) plus prefix length (0) must be < {MAX_LENGTH}"
    error = failure(lambda: stub.Generate(unary_request("é" * (most // 2) + "x")))
    assert (error.code(), violation(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "requests[0].text")
    assert error.details() == f"requests[0].text has {most + 1} bytes, at most {most} fit into any input"
    truncated = unary_request("x" * most + "ab", 4)
    truncated.params.truncate_input_tokens = 2
    assert one(stub, truncated).text == "abab"


def test_streams_that_nobody_reads_keep_no_places(server: Server, stub: Stub) -> None:
    request = as_stream_request(unary_request("abc", 5)).SerializeToString()
    method = "/fmaas.GenerationService/GenerateStream"
    streams = [call_frames(method, request, 2 * index + 1) for index in range(MAX_INPUTS)]
    before = gauge(server, "tgi_batch_generated_tokens_total")
    with socket.create_connection(("localhost", server.grpc_port)) as connection:
        connection.sendall(HELLO_WITHOUT_WINDOW + b"".join(streams))
        wait_until(lambda: gauge(server, "tgi_batch_generated_tokens_total") == before + 5 * MAX_INPUTS)
        full = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="abc")] * MAX_INPUTS)
        texts = [response.text for response in stub.Generate(full, timeout=30).responses]
    assert texts == ["abcabcabcabcabcabcab"] * MAX_INPUTS


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
    assert "2 inputs of this client in flight, at most 2 allowed" in quota.violations[0].description


def test_a_call_that_takes_too_much_memory(stub: Stub) -> None:
    request = pb.BatchedTokenizeRequest(requests=[{"text": "x" * ((4 << 20) - 100)}], return_tokens=True)
    error = failure(lambda: stub.Tokenize(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.fullmatch(r"the call takes \d{8} bytes of memory, at most 67108864 allowed", error.details())


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


def test_a_poisoned_request_fails_alone(stub: Stub) -> None:
    others = [stub.Generate.future(unary_request("abcdefg" * (n + 1), 100)) for n in range(5)]
    poisoned = failure(lambda: stub.Generate(unary_request("!")))  # "!" is token 0
    assert poisoned.code() is grpc.StatusCode.INTERNAL
    for n, other in enumerate(others):
        assert other.result().responses[0].text == ("abcdefg" * 100)[:100], n


def test_one_bad_input_fails_its_whole_call_at_once(server: Server, stub: Stub) -> None:
    cancelled, generated = 'tgi_request_failure{err="cancelled"}', "tgi_batch_generated_tokens_total"
    wait_until(lambda: gauge(server, "tgi_batch_current_size") == 0)  # what other tests have cancelled is counted
    before = {name: gauge(server, name) for name in (cancelled, generated)}
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in ("abc", "!", "def")])
    request.params.stopping.max_new_tokens = MAX_NEW
    assert failure(lambda: stub.Generate(request)).code() is grpc.StatusCode.INTERNAL
    wait_until(lambda: gauge(server, "tgi_batch_current_size") == 0)
    assert gauge(server, cancelled) - before[cancelled] == 2
    assert gauge(server, generated) - before[generated] < 2 * MAX_NEW


@pytest.mark.parametrize("streamed", [False, True])
def test_a_cancelled_call_frees_its_rows(server: Server, stub: Stub, streamed: bool) -> None:
    before = gauge(server, "tgi_batch_generated_tokens_total")
    batch = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=f"abc{n}") for n in range(10)])
    batch.params.stopping.max_new_tokens = MAX_NEW
    if streamed:
        calls = [stub.GenerateStream(as_stream_request(unary_request(f"abc{n}", MAX_NEW))) for n in range(10)]
        for call in calls:
            next(call), next(call)
    else:
        calls = [stub.Generate.future(batch)]
    wait_until(lambda: gauge(server, "tgi_batch_current_size") == 10)
    for call in calls:
        call.cancel()
    wait_until(lambda: gauge(server, "tgi_batch_current_size") == 0)
    assert gauge(server, "tgi_batch_generated_tokens_total") - before < 10 * MAX_NEW


def test_health_is_fast_under_load(server: Server, stub: Stub) -> None:
    calls = [stub.Generate.future(unary_request("load " * 10, 100)) for _ in range(MAX_INPUTS - 5)]
    times = []
    for _ in range(20):
        started = time.monotonic()
        assert server.get("/health") == (200, "")
        times.append(time.monotonic() - started)
    assert sorted(times)[len(times) // 2] < 0.1
    assert all(len(each.result().responses[0].text) == 100 for each in calls)


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


def gauge(server: Server, name: str) -> float:
    labels = set(name.rstrip("}").partition("{")[2].split(",")) - {""}
    for line in server.get("/metrics")[1].splitlines():
        series, _, value = line.rpartition(" ")
        bare, _, rest = series.partition("{")
        if bare == name.partition("{")[0] and set(rest.rstrip("}").split(",")) - {""} == labels:
            return float(value)
    raise AssertionError(f"no {name}")


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        threading.Event().wait(0.005)


async def refusal_of(handler: Callable[[bytes, Any], Any], request: bytes) -> grpc.aio.AioRpcError:
    """What a server with nothing but this handler says to it."""
    server = grpc.aio.server()
    methods = {"Refuse": grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Service", methods),))
    port = server.add_insecure_port("localhost:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tests.Service/Refuse", bytes, bytes)(request)
    await server.stop(None)
    return caught.value


@run_async
async def test_a_status_fits_the_trailers_however_long_its_text_is() -> None:
    async def refuse(_request: bytes, context: Any) -> bytes:
        async with error_boundary(context):
            raise InvalidRequest("text", "ä" * 20_000)
        return b""

    error: Any = await refusal_of(refuse, b"")
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.fullmatch(r"ä+ \.\.\.", error.details())
    assert dict(error.trailing_metadata()).keys() == {"grpc-status-details-bin"}
