"""vllm.grpc.engine.VllmEngine: conversions field by field, and calls through its stub to the engine `fake`."""

import asyncio
import hashlib
import io
import json
import math
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from described_params import described
from grpc_calls import CONFIG, connected, make_calls, serving
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from harness import failure, run_async, unary_request
from local_server import LocalServer, local_server
from raw_http2 import HELLO, call_frames, next_frame_of
from scripted_api import LIMITS, ScriptedGenerator, output
from tables import read_table, table
from tokenizers import Tokenizer as Backend

from benchmarks.chaos.http2 import HEADERS
from tgis import __version__
from tgis.errors import InvalidRequest
from tgis.frontend.admission import Admission
from tgis.frontend.calls import GenerateCall
from tgis.frontend.tokenizer import Tokenizer
from tgis.models.files import ModelFiles
from tgis.pb import generation_pb2 as fmaas

pytest.importorskip("smg_grpc_proto", reason="the stubs of the router SMG are not installed")

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from tgis.api.grpc import vllm_convert as convert
from tgis.api.grpc import vllm_engine
from tgis.api.grpc.vllm_engine import VLLM_ENGINE, VllmEngine

ALWAYS = {"fill_context": True, "include_stop_sequence": False, "skip_special_tokens": False}
IDS = {"generated_tokens": True, "exact_top_n": True}


@table("parameters", "vllm engine")
def test_parameters(row: dict[str, Any]) -> None:
    message, params = row["message"], row["params"]
    expected = {"temperature": 1.0, "logprob_options": IDS} | ALWAYS | params
    if message.get("temperature") == 0:
        del expected["temperature"]
    assert described(convert.params(pb.SamplingParams(**message), LIMITS)) == expected


def test_every_parameter_is_converted_or_changes_no_token() -> None:
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    tested = {name for row in read_table("parameters", "vllm engine") for name in row["message"]}
    assert names - tested == {"spaces_between_special_tokens", "grammar_from_first_token", "structural_tag"}


@table("refusals", "vllm engine")
def test_what_is_refused_is_named(row: dict[str, Any]) -> None:
    message, field = row["message"], row["field"]
    fields = {"text": "a", "sampling_params": message} if field.startswith("sampling_params") else message
    with pytest.raises(InvalidRequest) as caught:
        convert.generate_call(pb.GenerateRequest(**fields), LIMITS, b"", b"", ())
    error = convert.invalid_request(caught.value)
    assert (error.field, str(error)) == (field, row["text"])


def test_logprobs() -> None:
    """The first input token has none; only as many candidates as were asked for each list."""
    request = pb.GenerateRequest(text="a", sampling_params={"logprobs": 1, "prompt_logprobs": 0})
    inputs = [("%", math.nan), ("&", -2.0, 3, ("'", -1.0))]
    ended = output(reason="MAX_TOKENS", tokens=[("(", -0.5, 1, ("(", -0.5), (")", -1.5))], input_tokens=inputs)
    (data,) = convert.Answer(request).messages(ended)
    complete = pb.GenerateResponse.FromString(data).complete
    top = pb.TopLogProbs(values=[-0.5], token_ids=[7])
    assert complete.output_logprobs == pb.OutputLogProbs(token_logprobs=[-0.5], token_ids=[7], top_logprobs=[top])
    assert complete.input_logprobs == pb.InputLogProbs(token_logprobs=[{}, {"value": -2.0}], token_ids=[4, 5])
    request.stream = True
    (data,) = convert.Answer(request).messages(output(input_tokens=inputs, input_token_count=2))
    expected = pb.GenerateStreamChunk(prompt_tokens=2, input_logprobs=complete.input_logprobs)
    assert pb.GenerateResponse.FromString(data).chunk == expected


@pytest.mark.parametrize(("reason", "matched"), [("EOS_TOKEN", 7), ("MAX_TOKENS", None)])
def test_a_stop_token_of_the_request_is_named(reason: str, matched: int | None) -> None:
    request = pb.GenerateRequest(text="a", sampling_params={"stop_token_ids": [7]})
    ended = output(reason=reason, tokens=[("("), ("(")], generated_token_count=2, num_cached_tokens=1)
    (data,) = convert.Answer(request).messages(ended)
    expected = pb.GenerateComplete(output_ids=[7, 7], completion_tokens=2, cached_tokens=1, matched_token_id=matched)
    expected.finish_reason = "stop" if matched else "length"
    assert pb.GenerateResponse.FromString(data).complete == expected


def test_the_input_of_a_call() -> None:
    """Ids have no text, so LOG_TEXT logs none that the model does not get."""
    request = pb.GenerateRequest(tokenized={"input_ids": [1], "original_text": "a"})
    call = convert.generate_call(request, LIMITS, b"", b"", ())
    assert (call.texts, call.token_ids, call.fields) == ([""], [[1]], ["tokenized.input_ids"])


# --- a port of this process, with a generator whose outputs the test writes ---


class HangingGenerator(ScriptedGenerator):
    """A generator whose streams never end."""

    num_queued_tokens: Any = 7

    async def batch_state(self) -> Any:
        counts = {"num_running": 1, "num_waiting": 2, "context_tokens": 30, "token_capacity": 40}
        return SimpleNamespace(max_batch_size=4, **counts)

    async def stream(self, call: GenerateCall) -> Any:
        yield output(tokens=[("(", -0.5)])
        await asyncio.Event().wait()


@asynccontextmanager
async def serving_engine(
    generator: ScriptedGenerator, reason: str | None = None, **options: Any
) -> AsyncIterator[tuple[Admission, int, VllmEngineStub]]:
    config, loaded = replace(CONFIG, **options), asyncio.get_running_loop().create_future()
    loaded.set_result(generator)
    calls, model = make_calls(config), ModelFiles(Path("/nowhere"), {}, {})
    engine = VllmEngine(calls, config, model, model.path, loaded, lambda: reason)
    async with serving(engine.handler(), config, calls) as (_, port), connected(port) as channel:
        yield calls.admission, port, VllmEngineStub(channel)


STOP_BYTES = "stop must have at most 16384 UTF8 bytes in all"


@pytest.mark.parametrize(
    ("outputs", "params", "code", "text"),
    [
        ([TimeoutError()], {}, grpc.StatusCode.INTERNAL, "internal error: TimeoutError"),
        ([], {"n": 5}, grpc.StatusCode.INVALID_ARGUMENT, "n must be from 1 to 4"),
        ([], {"n": 4}, grpc.StatusCode.OK, ""),
        ([], {"stop": ["x" * 1000] * 17}, grpc.StatusCode.INVALID_ARGUMENT, STOP_BYTES),
    ],
)
@run_async
async def test_failures(outputs: Any, params: Any, code: grpc.StatusCode, text: str, caplog: Any) -> None:
    async with serving_engine(ScriptedGenerator(outputs), max_concurrent_requests=4) as (_, _, stub):
        call = stub.Generate(pb.GenerateRequest(text="a", sampling_params=params))
        assert (await call.code(), await call.details()) == (code, text)
    assert ("internal error in a call" in caplog.messages) == (code is grpc.StatusCode.INTERNAL)


@run_async
async def test_a_special_token_stops_by_its_text() -> None:
    """Also where texts are without special tokens, as over the other APIs."""
    generator = ScriptedGenerator([output(reason="MAX_TOKENS")])
    async with serving_engine(generator) as (_, _, stub):
        params: Any = {"stop": ["</s>", "x"], "stop_token_ids": [4], "skip_special_tokens": True}
        await stub.Generate(pb.GenerateRequest(text="a", sampling_params=params)).read()
    assert generator.call is not None
    assert generator.call.params.sampling.stop_token_ids == (4, 256)


@run_async
async def test_an_abort_needs_an_id_and_the_address_of_the_call() -> None:
    async with serving_engine(HangingGenerator([]), "it hangs", limit_by_address=True) as (_, port, stub):
        calls = [stub.Generate(pb.GenerateRequest(request_id=name, text="a", stream=True)) for name in ("x", "")]
        for call in calls:
            await call.read()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        message = pb.AbortRequest(request_ids=["x"]).SerializeToString()
        writer.write(HELLO + call_frames(f"/{VLLM_ENGINE}/Abort", message))
        await next_frame_of(reader, HEADERS)
        writer.close()
        await stub.Abort(pb.AbortRequest(request_ids=[""]))
        assert await stub.HealthCheck(pb.HealthCheckRequest()) == pb.HealthCheckResponse(message="it hangs")
        (load,) = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        requests: Any = {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_total_reqs": 3, "max_running_requests": 4}
        tokens: Any = {"num_used_tokens": 30, "max_total_num_tokens": 40, "num_waiting_uncached_tokens": 7}
        assert load == pb.SchedulerLoad(token_usage=0.75, **requests, **tokens)
        with pytest.raises(grpc.aio.AioRpcError, match='FlushCache needs a bearer token or a client certificate"'):
            await stub.FlushCache(common_pb2.FlushCacheRequest())
        assert not any(call.done() for call in calls)
        await stub.Abort(pb.AbortRequest(request_ids=["x"]))
        assert await calls[0].code() is grpc.StatusCode.CANCELLED


@run_async
async def test_what_takes_no_place_of_calls_that_work_and_what_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, all_wait, to_json = list[Tokenizer](), threading.Event(), Tokenizer.to_json

    def slow_to_json(tokenizer: Tokenizer) -> str:
        made.append(tokenizer)
        all_wait.wait(10)
        return to_json(tokenizer)

    monkeypatch.setattr(Tokenizer, "to_json", slow_to_json)
    monkeypatch.setattr(vllm_engine, "_CHUNK_BYTES", 1000)
    async with serving_engine(ScriptedGenerator([])) as (admission, _, stub):

        async def size() -> int:
            chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
            assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            return sum(len(chunk.data) for chunk in chunks)

        sizes = asyncio.gather(*[size() for _ in range(4)])
        while admission.calls.total < 4:
            await asyncio.sleep(0)
        all_wait.set()
        assert len({*await sizes, await size()}) == len(made) == 1
        with admission.calls.hold(b"", admission.calls.limit):
            assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
            await stub.Abort(pb.AbortRequest())
        assert (await stub.GetModelInfo(pb.GetModelInfoRequest())).default_sampling_params_json == ""


FILES = ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"]

# --- through the stub; the engine repeats its prompt, whose tokens are bytes ---


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("vllm")
    (directory / "tokens").write_text("first\nsecond\n")
    (directory / "model").mkdir()
    for name in FILES:
        (directory / "model" / name).write_text("{}")
    (directory / "model/generation_config.json").write_text(
        '{"repetition_penalty": 2, "top_k": 9, "temperature": 1, "top_p": null, "min_p": 0, "seed": 7}'
    )
    steps = {"max_sequence_length": 200, "step_seconds": 0.01}
    with local_server(directory, steps, AUTH_TOKEN_PATH=directory / "tokens", MAX_NEW_TOKENS=169) as running:
        yield running


@pytest.fixture
def stub(server: LocalServer) -> Iterator[VllmEngineStub]:
    with grpc.insecure_channel(server.target) as channel:
        yield VllmEngineStub(channel)


FIRST, SECOND = ([("authorization", f"Bearer {name}")] for name in ("first", "second"))


def test_ids_in_and_out_as_over_fmaas(server: LocalServer, stub: VllmEngineStub) -> None:
    params = {"temperature": 0, "max_tokens": 5, "n": 2, "stop": ["$%"]}
    request = pb.GenerateRequest(tokenized={"input_ids": [1, 2, 3, 4, 5]}, sampling_params=params)
    whole = [response.complete for response in stub.Generate(request, metadata=FIRST)]
    request.stream = True
    streamed = list(stub.Generate(request, metadata=FIRST))
    same = unary_request("", 5, stop_sequences=["$%"])
    same.requests[0].token_ids.extend([1, 2, 3, 4, 5])
    same.params.response.CopyFrom(fmaas.ResponseOptions(generated_tokens=True, token_ids=True))
    with server.stub() as other:
        (expected,) = other.Generate(same, metadata=FIRST).responses
    ids = [token.id for token in expected.tokens]
    for index, complete in enumerate(whole):
        assert (complete.index, complete.output_ids, complete.completion_tokens) == (index, ids, len(ids))
        assert (complete.finish_reason, complete.matched_stop_str, complete.prompt_tokens) == ("stop", "$%", 5)
        chunks = [response.chunk for response in streamed if response.HasField("chunk")]
        assert [token for chunk in chunks if chunk.index == index for token in chunk.token_ids] == ids
        assert [chunk.completion_tokens for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
        complete.ClearField("output_ids")
        assert complete in [response.complete for response in streamed]


def test_only_the_caller_of_a_request_can_abort_it(stub: VllmEngineStub) -> None:
    params = {"temperature": 0, "min_tokens": 150}
    request = pb.GenerateRequest(request_id="x", text="abc", stream=True, sampling_params=params)
    responses = iter(stub.Generate(request, metadata=FIRST))
    next(responses)
    stub.Abort(pb.AbortRequest(request_ids=["x"]), metadata=SECOND)
    for _ in range(3):
        next(responses)
    aborts = [stub.Abort.future(pb.AbortRequest(request_ids=["y", "x"]), metadata=FIRST) for _ in range(3)]
    assert [abort.result() for abort in aborts] == [pb.AbortResponse()] * 3
    assert failure(lambda: list(responses)) == (grpc.StatusCode.CANCELLED, "the request was aborted")


def test_what_routers_ask(server: LocalServer, stub: VllmEngineStub) -> None:
    assert stub.HealthCheck(pb.HealthCheckRequest(), metadata=FIRST) == pb.HealthCheckResponse(healthy=True)
    assert stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=FIRST) == pb.GetModelInfoResponse(
        served_model_name="model",
        tokenizer_path=str(server.log.parent / "model"),
        is_generation=True,
        max_context_length=200,
        max_req_input_len=199,
        vocab_size=257,
        model_type="fake",
        architectures=["FakeEngine"],
        eos_token_ids=[256],
        pad_token_id=256,
        default_sampling_params_json='{"temperature": 1, "top_k": 9, "min_p": 0, "repetition_penalty": 2}',
    )
    info = stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=FIRST)
    assert info.uptime_seconds > 0
    info.ClearField("uptime_seconds")
    sizes: Any = {"data_parallel_size": 1, "kv_cache_dtype": "auto", "max_num_seqs": 256}
    names: Any = {"server_type": "vllm-grpc", "model_dtype": "torch.none", "constrained_decoding_start": "first_token"}
    assert info == pb.GetServerInfoResponse(**sizes, **names)
    loads = stub.GetLoads(pb.GetLoadsRequest(), metadata=FIRST)
    assert (loads.version, loads.dp_rank_count) == (__version__, 1)
    capacity = loads.loads[0].max_total_num_tokens
    assert [*loads.loads] == [pb.SchedulerLoad(max_total_num_tokens=capacity, max_running_requests=256)]
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=FIRST))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert Backend.from_str(archive.read("tokenizer.json").decode()).token_to_id("</s>") == 256
        assert archive.namelist() == ["tokenizer.json", *FILES, "config.json", "generation_config.json"]
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}  # the same bytes everywhere
    with grpc.insecure_channel(server.target) as channel:
        asked = health_pb2.HealthCheckRequest(service=VLLM_ENGINE)
        assert HealthStub(channel).Check(asked).status == health_pb2.HealthCheckResponse.SERVING
    assert json.loads(server.get("/openapi.json")[1])["security"] == [{"token": []}]
    flushed = common_pb2.FlushCacheResponse(success=True, message="no prefix is cached any more")
    assert stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=FIRST) == flushed
    assert failure(lambda: stub.Embed(pb.EmbedRequest(), metadata=FIRST))[0] is grpc.StatusCode.UNIMPLEMENTED
