"""Random grammars to a real server: every call ends with a proper status, and the server goes on as before."""

import asyncio
import collections
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from harness import Server, running_server, unary_request
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.structured_output.random_grammars import random_grammar
from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

AT_ONCE, CALL_TIMEOUT = 10, 60
PROPER = {"OK", "INVALID_ARGUMENT", "Model is overloaded"}
LONG = "secret" * 5000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("grammars")
    with running_server(
        directory, make_fake_model(directory / "model", block_size=16), DEPLOYMENT_FRAMEWORK="fake"
    ) as running:
        yield running


@pytest.mark.parametrize(
    "examples", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["some", "many"]
)
def test_every_call_ends_with_a_proper_status(server: Server, examples: int) -> None:
    statuses = collections.Counter[str]()

    @settings(max_examples=examples)
    @given(st.integers(0, 2**32))
    def send(seed: int) -> None:
        draw = random.Random(seed)
        requests = [_request(draw) for _ in range(AT_ONCE)]
        found = asyncio.run(_send_all(server.target, requests))
        wrong = [f"{each}: {request}" for each, request in zip(found, requests, strict=True) if each not in PROPER]
        assert not wrong, "\n".join(wrong)
        statuses.update(found)

    before = _usual_answer(server)
    send()
    assert min(statuses["OK"], statuses["INVALID_ARGUMENT"]) > sum(statuses.values()) / 10
    assert _usual_answer(server) == before
    assert server.get("/health")[0] == 200


def test_a_long_name_is_cut_in_the_status_and_never_logged(server: Server) -> None:
    schemas = [json.dumps({"type": LONG}), json.dumps({"$ref": LONG})]
    given = [pb.DecodingParameters(json_schema=each) for each in schemas]
    for decoding in (*given, pb.DecodingParameters(grammar=f"root ::= {LONG}")):
        request = unary_request("a", 1)
        request.params.decoding.CopyFrom(decoding)
        with server.stub() as stub, pytest.raises(grpc.RpcError) as caught:
            stub.Generate(request, timeout=CALL_TIMEOUT)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "secret" in error.details()
        assert len(error.details()) < 300
    until = time.monotonic() + 20
    while "single call failed: grammar cannot be compiled" not in (log := server.log.read_text()):
        assert time.monotonic() < until, log
        time.sleep(0.02)
    assert "secret" not in log


def _request(draw: random.Random) -> pb.BatchedGenerationRequest:
    request = unary_request("a", draw.randint(1, 16))
    request.params.decoding.CopyFrom(random_grammar(draw))
    return request


async def _send_all(target: str, requests: list[pb.BatchedGenerationRequest]) -> list[str]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = pb_grpc.GenerationServiceStub(channel)
        return await asyncio.gather(*[_status(stub, request) for request in requests])


async def _status(stub: pb_grpc.GenerationServiceStub, request: pb.BatchedGenerationRequest) -> str:
    try:
        await stub.Generate(request, timeout=CALL_TIMEOUT)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC itself has it for too large messages and trailers
            return str(error.details())
        return error.code().name
    return "OK"


def _usual_answer(server: Server) -> pb.BatchedGenerationResponse:
    with server.stub() as stub:
        answer: pb.BatchedGenerationResponse = stub.Generate(unary_request("The Queen", 20), timeout=CALL_TIMEOUT)
    return answer
