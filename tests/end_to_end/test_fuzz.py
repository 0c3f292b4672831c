"""Random and corrupted requests and grammars: each ends with a proper status, and the server goes on as before."""

import asyncio
import collections
import functools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzz_messages import mutated, random_message
from google.protobuf.message import DecodeError, Message
from harness import Server, failure, running_fake, running_server, unary_request, wait_until
from repository import REPOSITORY, python_path

from benchmarks.structured_output.random_grammars import random_grammar
from tgis.pb import generation_pb2 as pb

MAX_IN_FLIGHT = 48
CALL_TIMEOUT = 60  # seconds that a call may take
MAX_SHORT_DEADLINE = 0.05  # longest deadline in seconds of the clients that cancel early
HUGE_BYTES = 5 << 20
LONG = "secret" * 5000
INPUTS = 400
PROPER = {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}
KINDS: dict[str, tuple[type[Message], type[Message]]] = {
    "Generate": (pb.BatchedGenerationRequest, pb.BatchedGenerationResponse),
    "GenerateStream": (pb.SingleGenerationRequest, pb.GenerationResponse),
    "Tokenize": (pb.BatchedTokenizeRequest, pb.BatchedTokenizeResponse),
    "ModelInfo": (pb.ModelInfoRequest, pb.ModelInfoResponse),
}
RPCS = ["Generate", "Generate", "GenerateStream", "GenerateStream", "Tokenize", "ModelInfo"]


@dataclass(frozen=True, slots=True)
class Attack:
    """A call with these bytes as its request."""

    rpc: str
    data: bytes
    deadline: float  # deadline in seconds

    def __str__(self) -> str:
        return f"{self.rpc} {self.data[:400]!r}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"MAX_NEW_TOKENS": 64, "MAX_CONCURRENT_REQUESTS": INPUTS}
    with running_fake(tmp_path_factory.mktemp("fuzz"), {"max_sequence_length": 256}, **options) as running:
        yield running


@pytest.mark.parametrize(
    ("seed", "attacks"), [(1, 800), pytest.param(2, 60_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_every_call_ends_with_a_proper_status(server: Server, seed: int, attacks: int) -> None:
    _check(server, seed, attacks)


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["lookup", "garbage", "drafts"])
def test_forced_proposals_change_no_status(glassllm_dir: Path, tmp_path: Path, proposer: str) -> None:
    """A model gets the calls, and verifies as many tokens in each step as it may."""
    options: dict[str, Any] = {"MAX_NEW_TOKENS": 64, "MAX_SEQUENCE_LENGTH": 128, "MAX_CONCURRENT_REQUESTS": INPUTS}
    path = python_path(REPOSITORY / "tests/support/forced_lookup", REPOSITORY)
    with running_server(tmp_path, glassllm_dir, **options, PYTHONPATH=path, PROPOSER=proposer) as server:
        _check(server, 1, 1_500)
        kind = "draft" if proposer == "drafts" else "lookup"
        proposed, kept = (
            server.metric(f'tgi_speculation_{what}_tokens_total{{proposer="{kind}"}}')
            for what in ("proposed", "accepted")
        )
        assert proposed > 1000
        assert kept or proposer == "garbage"


def _check(server: Server, seed: int, attacks: int) -> None:
    before = _usual_answer(server)
    draw = random.Random(seed)
    statuses = asyncio.run(_attack(server.target, [_make_attack(draw) for _ in range(attacks)]))
    assert statuses["OK"] > attacks / 10
    assert statuses["INVALID_ARGUMENT"] > attacks / 10
    wait_until(lambda: _all_places_are_free(server), "free place for every input")
    assert _usual_answer(server) == before
    assert server.get("/health")[0] == 200


def test_a_long_name_is_cut_in_the_status_and_never_logged(server: Server) -> None:
    schemas = [json.dumps({key: LONG}) for key in ("type", "$ref")]
    given = [pb.DecodingParameters(json_schema=each) for each in schemas]
    for decoding in (*given, pb.DecodingParameters(grammar=f"root ::= {LONG}")):
        request = unary_request("a", 1)
        request.params.decoding.CopyFrom(decoding)
        with server.stub() as stub:
            code, details = failure(functools.partial(stub.Generate, request, timeout=CALL_TIMEOUT))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert ("secret" in details) == bool(decoding.grammar)  # of a schema only short names are told
        assert len(details) < 300
    said = "single call failed: grammar cannot be compiled"
    wait_until(lambda: said in server.log.read_text(), "line in the log")
    assert "secret" not in server.log.read_text()


def _usual_answer(server: Server) -> pb.BatchedGenerationResponse:
    with server.stub() as stub:
        answer: pb.BatchedGenerationResponse = stub.Generate(unary_request("The Queen", 20), timeout=CALL_TIMEOUT)
    return answer


def _all_places_are_free(server: Server) -> bool:
    """Whether a call that needs all places succeeds; the latest calls may not have returned theirs."""
    request = unary_request("a", 1)
    request.requests.extend(request.requests[:1] * (INPUTS - 1))
    with server.stub() as stub:
        try:
            return len(stub.Generate(request, timeout=CALL_TIMEOUT).responses) == INPUTS
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
    return False


def _make_attack(draw: random.Random) -> Attack:
    if draw.random() < 0.05:
        request = unary_request("a", draw.randint(1, 16))
        request.params.decoding.CopyFrom(random_grammar(draw))
        return Attack("Generate", request.SerializeToString(), CALL_TIMEOUT)
    rpc = draw.choice(RPCS)
    deadline = draw.uniform(0.001, MAX_SHORT_DEADLINE) if draw.random() < 0.05 else CALL_TIMEOUT
    return Attack(rpc, _make_bytes(KINDS[rpc][0], draw), deadline)


def _make_bytes(kind: type[Message], draw: random.Random) -> bytes:
    match draw.random():
        case chance if chance < 0.002:
            return bytes(HUGE_BYTES)
        case chance if chance < 0.1:
            return draw.randbytes(draw.randint(0, 60))
        case chance:
            data = random_message(kind, draw).SerializeToString()
            return mutated(data, draw) if chance < 0.35 else data


async def _attack(target: str, attacks: list[Attack]) -> collections.Counter[str]:
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)
    async with grpc.aio.insecure_channel(target) as channel:
        statuses = await asyncio.gather(*[_status(channel, slots, attack) for attack in attacks])
    wrong = [
        f"{status}: {attack}"
        for attack, status in zip(attacks, statuses, strict=True)
        if status not in PROPER and not (attack.deadline < CALL_TIMEOUT and status == "DEADLINE_EXCEEDED")
    ]
    assert not wrong, "\n".join(wrong[:20])
    by_rpc = collections.Counter(f"{attack.rpc} {status}" for attack, status in zip(attacks, statuses, strict=True))
    print(by_rpc)
    return collections.Counter(statuses)


async def _status(channel: grpc.aio.Channel, slots: asyncio.Semaphore, attack: Attack) -> str:
    """The name of the status, or what is wrong with the answer."""
    method = f"/fmaas.GenerationService/{attack.rpc}"
    async with slots:
        try:
            if attack.rpc == "GenerateStream":
                stream = channel.unary_stream(method, bytes, bytes)(attack.data, timeout=attack.deadline)
                messages = [message async for message in stream]
            else:
                messages = [await channel.unary_unary(method, bytes, bytes)(attack.data, timeout=attack.deadline)]
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return _verdict(attack, messages)


def _verdict(attack: Attack, messages: list[bytes]) -> str:
    try:
        answers = [KINDS[attack.rpc][1].FromString(message) for message in messages]
    except DecodeError:
        return "an answer that cannot be decoded"
    last = answers[-1]
    if isinstance(last, pb.GenerationResponse) and not last.stop_reason:
        return "a stream without an end"
    return "OK"
