"""Random, corrupted and malformed input, and the most of every field: proper statuses and bounded memory."""

import asyncio
import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzz_messages import mutated, random_message
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from harness import Server, failure, run_async, running_fake, unary_request, wait_until

from benchmarks.structured_output.random_grammars import random_grammar
from tgis.pb import generation_pb2 as pb

MAX_LENGTH = 4096
INPUTS = 400
TIMEOUT = 60  # seconds that a call may take
SERVICE = "fmaas.GenerationService"
PROPER = {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"MAX_NEW_TOKENS": 64, "MAX_CONCURRENT_REQUESTS": INPUTS}
    with running_fake(tmp_path_factory.mktemp("plain"), {"max_sequence_length": MAX_LENGTH}, **options) as running:
        yield running


# Random messages

KINDS: dict[str, tuple[type[Message], type[Message]]] = {
    "Generate": (pb.BatchedGenerationRequest, pb.BatchedGenerationResponse),
    "GenerateStream": (pb.SingleGenerationRequest, pb.GenerationResponse),
    "Tokenize": (pb.BatchedTokenizeRequest, pb.BatchedTokenizeResponse),
    "ModelInfo": (pb.ModelInfoRequest, pb.ModelInfoResponse),
}


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 500), pytest.param(2, 60_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_every_call_ends_with_a_proper_status(server: Server, seed: int, count: int) -> None:
    before = usual_answer(server)
    draw = random.Random(seed)
    statuses = asyncio.run(send_all(server.target, [random_call(draw) for _ in range(count)]))
    assert statuses.keys() <= PROPER | {"DEADLINE_EXCEEDED"}
    assert min(statuses["OK"], statuses["INVALID_ARGUMENT"]) > count / 10
    wait_until(lambda: all_places_are_free(server), "free place for every input")
    assert usual_answer(server) == before


def usual_answer(server: Server) -> pb.BatchedGenerationResponse:
    with server.stub() as stub:
        answer: pb.BatchedGenerationResponse = stub.Generate(unary_request("The Queen", 20), timeout=TIMEOUT)
    return answer


def all_places_are_free(server: Server) -> bool:
    """Whether a call that needs all places succeeds; the latest calls may not have returned theirs."""
    request = unary_request("a", 1)
    request.requests.extend(request.requests[:1] * (INPUTS - 1))
    with server.stub() as stub, suppress(grpc.RpcError):
        return len(stub.Generate(request, timeout=TIMEOUT).responses) == INPUTS
    return False


def random_call(draw: random.Random) -> tuple[str, bytes, float]:
    """RPC, request and deadline in seconds."""
    rpc, deadline = draw.choice(list(KINDS)), TIMEOUT if draw.random() < 0.95 else draw.uniform(0.001, 0.05)
    data = random_message(KINDS[rpc][0], draw).SerializeToString()
    match draw.random():
        case chance if chance < 0.05:
            request = unary_request("a", draw.randint(1, 16))
            request.params.decoding.CopyFrom(random_grammar(draw))
            rpc, data = "Generate", request.SerializeToString()
        case chance if chance < 0.3:
            data = mutated(data, draw)
        case chance if chance < 0.302:
            data = bytes(5 << 20)
    return rpc, data, deadline


async def send_all(target: str, calls: list[tuple[str, bytes, float]]) -> Counter[str]:
    slots = asyncio.Semaphore(48)
    async with grpc.aio.insecure_channel(target) as channel:

        async def status(rpc: str, data: bytes, deadline: float) -> str:
            kind: Any = channel.unary_stream if rpc == "GenerateStream" else channel.unary_unary
            async with slots:
                try:
                    call = kind(f"/{SERVICE}/{rpc}", bytes, KINDS[rpc][1].FromString)(data, timeout=deadline)
                    messages = [each async for each in call] if rpc == "GenerateStream" else [await call]
                except grpc.aio.AioRpcError as error:
                    is_short = deadline < TIMEOUT
                    expired = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    return error.code().name if is_short or not expired else f"a call of {rpc} hangs: {data[:400]!r}"
                except DecodeError:
                    return f"a reply of {rpc} cannot be decoded: {data[:400]!r}"
            ended = rpc != "GenerateStream" or messages[-1].stop_reason
            return "OK" if ended else f"a stream without an end: {data[:400]!r}"

        return Counter(await asyncio.gather(*[status(*each) for each in calls]))


def test_a_long_name_is_cut_in_the_status_and_never_logged(server: Server) -> None:
    secret = "secret" * 5000
    schemas = [json.dumps({key: secret}) for key in ("type", "$ref")]
    given = [pb.DecodingParameters(json_schema=each) for each in schemas]
    for decoding in (*given, pb.DecodingParameters(grammar=f"root ::= {secret}")):
        request = unary_request("a", 1)
        request.params.decoding.CopyFrom(decoding)
        with server.stub() as stub:
            code, details = failure(functools.partial(stub.Generate, request, timeout=TIMEOUT))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert ("secret" in details) == bool(decoding.grammar)  # of a schema only short names are told
        assert len(details) < 300
    said = "single call failed: grammar cannot be compiled"
    wait_until(lambda: said in server.log.read_text(), "line in the log")
    assert "secret" not in server.log.read_text()


# The most of every field

FIELD_BYTES = (4 << 20) - 4096  # nearly the default of GRPC_MAX_MESSAGE_BYTES
RPCS: dict[str, Any] = {
    f"{SERVICE}/Generate": pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")]),
    f"{SERVICE}/GenerateStream": pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a")),
    f"{SERVICE}/Tokenize": pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a")]),
    f"{SERVICE}/ModelInfo": pb.ModelInfoRequest(),
    "grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest(),
    "grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest(),
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(),
}


@pytest.mark.parametrize("rpc", RPCS)
def test_no_field_takes_much_memory(server: Server, rpc: str) -> None:
    usual = RPCS[rpc]
    for name, data in [*worst_fields(usual.DESCRIPTOR), ("an unknown field", b"\xf8\x07\1" * (FIELD_BYTES // 3))]:
        if not name.endswith("text, long"):
            check(server, rpc, name, usual.SerializeToString() + data, 128 << 20, 1 << 20)
    check(server, rpc, "no message", b"\xff" * FIELD_BYTES, 128 << 20, 1 << 20)


def test_all_details_do_not(server: Server) -> None:
    options = dict.fromkeys(("input_text", "generated_tokens", "input_tokens", "token_logprobs", "token_ranks"), True)
    params = pb.Parameters(response=pb.ResponseOptions(**options, top_n_tokens=10))
    params.stopping.max_new_tokens = 32
    inputs = [pb.GenerationRequest(text="a" * (MAX_LENGTH - 64))]
    batch = pb.BatchedGenerationRequest(requests=inputs, params=params)
    check(server, next(iter(RPCS)), "all details", batch.SerializeToString(), 128 << 20, 17 << 20)


def check(server: Server, rpc: str, name: str, data: bytes, most: int, reply: int) -> None:
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # forget the peak
    before = memory(server, "VmRSS")
    status, size = asyncio.run(worst_call(server.target, rpc, data))
    assert status in PROPER | {"NOT_FOUND", "still open"}, name
    # the tokenizers library takes about 200 bytes for a byte of a text of which every character is a token
    assert memory(server, "VmHWM") - before < most + 256 * len(data), name
    assert size < reply + 16 * len(data), name


def memory(server: Server, name: str) -> int:
    """The bytes of the front end that the kernel counts under this name."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


async def worst_call(target: str, rpc: str, data: bytes) -> tuple[str, int]:
    """The status, and the bytes of the reply."""
    size, options = 0, [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stream = channel.stream_stream(f"/{rpc}", bytes, bytes)(iter([data]), timeout=120)
        try:
            async with asyncio.timeout(0.05 if rpc.endswith("Watch") else None):
                async for message in stream:
                    size += len(message)
        except grpc.aio.AioRpcError as error:
            return error.code().name, size
        except TimeoutError:
            return "still open", size
    return "OK", size


def worst_fields(message: Any, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Each field with the most that fits into a message; a field that may be repeated is."""
    for field in message.fields:
        name, tag = path + field.name, field.number << 3 | 2
        if field.message_type is not None:
            yield f"{name}, repeated", repeated(delimited(tag, b""))
            yield from ((inner, delimited(tag, data)) for inner, data in worst_fields(field.message_type, f"{name}."))
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield f"{name}, long", delimited(tag, b"a " * (FIELD_BYTES // 2))
            yield f"{name}, repeated", repeated(delimited(tag, b""))
        elif field.default_value == []:  # a list of numbers
            yield f"{name}, millions", delimited(tag, b"\1" * FIELD_BYTES)


def repeated(data: bytes) -> bytes:
    return data * (FIELD_BYTES // len(data))


def delimited(tag: int, data: bytes) -> bytes:
    return varint(tag) + varint(len(data)) + data


def varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


# Malformed requests

PIECE = b"x" * (1 << 18)
HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
JUNK = {
    "x": b"",
    "zeros behind a head": b"GET /health HTTP/1.1\r\n",
    "no chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    "TLS": bytes.fromhex("16030140000100"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a body that is refused": HEAD + b'Content-Length: 50000\r\n\r\n{"inputs": "',
}
# aiohttp keeps the bytes of a malformed request in reference cycles: some wait for the next collection.
JUNK_BYTES = 200 << 20


async def send_junk(port: int, beginning: bytes) -> None:
    """A megabyte, until the server closes the connection; what the server sends is not read."""
    with suppress(ConnectionError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in (beginning + PIECE, *[PIECE] * 3):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        finally:
            writer.transport.abort()


@pytest.mark.slow
@run_async
async def test_malformed_requests_leave_no_memory(server: Server) -> None:
    before = 0
    for number in range(6):
        for port, beginning in itertools.product((server.http_port, server.grpc_port), JUNK.values()):
            await asyncio.gather(*(send_junk(port, beginning) for _ in range(20)))
        if number == 1:
            before = memory(server, "VmRSS")  # what is imported and kept for later stays
    # the server trims its heap twice a minute
    wait_until(lambda: memory(server, "VmRSS") - before < JUNK_BYTES, "memory given back", 40)
    assert server.get("/health")[0] == 200
