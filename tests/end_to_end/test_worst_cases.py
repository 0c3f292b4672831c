"""The largest value of every field of every RPC ends with a proper status, in bounded memory and a bounded reply."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from harness import Server, running_fake

from tgis.pb import generation_pb2 as pb

FIELD_BYTES = (4 << 20) - 4096  # nearly the default of GRPC_MAX_MESSAGE_BYTES
MAX_LENGTH = 4096
WATCH_SECONDS = 0.05  # a stream without an end is left after that
PROPER = {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "NOT_FOUND", "still open"}
RPCS: dict[str, Any] = {
    "fmaas.GenerationService/Generate": pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")]),
    "fmaas.GenerationService/GenerateStream": pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a")),
    "fmaas.GenerationService/Tokenize": pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a")]),
    "fmaas.GenerationService/ModelInfo": pb.ModelInfoRequest(),
    "grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest(),
    "grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest(),
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_fake(tmp_path_factory.mktemp("worst"), {"max_sequence_length": MAX_LENGTH}) as running:
        yield running


@pytest.mark.parametrize("rpc", RPCS)
def test_no_field_takes_much_memory(server: Server, rpc: str) -> None:
    usual = RPCS[rpc]
    for name, data in [*worst_fields(usual.DESCRIPTOR), ("an unknown field", b"\xf8\x07\1" * (FIELD_BYTES // 3))]:
        if not name.endswith("text, long"):
            check(server, rpc, name, usual.SerializeToString() + data, 128 << 20, 1 << 20)
    check(server, rpc, "no message", b"\xff" * FIELD_BYTES, 128 << 20, 1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count"), [(FIELD_BYTES, 1), (FIELD_BYTES // 4, 1), (4000, 1000), (0, 1000)])
def test_no_texts_do(server: Server, size: int, count: int) -> None:
    texts = ["a " * (size // 2)] * count
    batch = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in texts])
    generate, _, tokenize, *_ = RPCS
    check(server, generate, "too long", batch.SerializeToString(), 512 << 20, 17 << 20)
    batch.params.truncate_input_tokens = 8
    check(server, generate, "truncated", batch.SerializeToString(), 512 << 20, 17 << 20)
    request = pb.BatchedTokenizeRequest(return_tokens=True, return_offsets=True)
    request.requests.extend(pb.TokenizeRequest(text=text) for text in texts)
    check(server, tokenize, "tokens and offsets", request.SerializeToString(), 512 << 20, 17 << 20)


@pytest.mark.parametrize("count", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_all_details_do_not(server: Server, count: int) -> None:
    options = dict.fromkeys(("input_text", "generated_tokens", "input_tokens", "token_logprobs", "token_ranks"), True)
    params = pb.Parameters(response=pb.ResponseOptions(**options, top_n_tokens=10))
    params.stopping.max_new_tokens = 32
    inputs = [pb.GenerationRequest(text="a" * (MAX_LENGTH - 64))] * count
    batch = pb.BatchedGenerationRequest(requests=inputs, params=params)
    check(server, next(iter(RPCS)), "all details", batch.SerializeToString(), 128 << 20, 17 << 20)


def check(server: Server, rpc: str, name: str, data: bytes, memory: int, reply: int) -> None:
    process = Path("/proc", str(server.process.pid))
    (process / "clear_refs").write_text("5")  # forget the peak
    before = resident(process, "VmRSS")
    status, size = asyncio.run(call(server.target, rpc, data))
    assert status in PROPER, name
    # the tokenizers library takes about 200 bytes for a byte of a text of which every character is a token
    assert resident(process, "VmHWM") - before < memory + 256 * len(data), name
    assert size < reply + 16 * len(data), name


def resident(process: Path, name: str) -> int:
    """The bytes that the kernel counts under this name."""
    return 1024 * int((process / "status").read_text().partition(f"{name}:")[2].split()[0])


async def call(target: str, rpc: str, data: bytes) -> tuple[str, int]:
    """The status, and the bytes of the reply."""
    size, options = 0, [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stream = channel.stream_stream(f"/{rpc}", bytes, bytes)(iter([data]), timeout=120)
        try:
            async with asyncio.timeout(WATCH_SECONDS if rpc.endswith("Watch") else None):
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
