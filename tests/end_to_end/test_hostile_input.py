"""Long names, and the most of every field: proper statuses and bounded memory."""

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from harness import Server, failure, running_fake, unary_request, wait_until

from tgis.pb import generation_pb2 as pb

MAX_LENGTH = 4096
TIMEOUT = 60  # seconds that a call may take
SERVICE = "fmaas.GenerationService"
PROPER = {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    steps = {"max_sequence_length": MAX_LENGTH}
    with running_fake(tmp_path_factory.mktemp("plain"), steps, MAX_NEW_TOKENS=64) as running:
        yield running


def test_a_long_name_is_neither_in_the_status_nor_logged(server: Server) -> None:
    secret = "secret" * 5000
    schemas = [json.dumps({key: secret}) for key in ("type", "$ref")]
    given = [pb.DecodingParameters(json_schema=each) for each in schemas]
    for decoding in (*given, pb.DecodingParameters(grammar=f"root ::= {secret}")):
        request = unary_request("a", 1)
        request.params.decoding.CopyFrom(decoding)
        with server.stub() as stub:
            code, details = failure(functools.partial(stub.Generate, request, timeout=TIMEOUT))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "secret" not in details  # only short names are told
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
    assert status in PROPER, name
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
            async for message in stream:
                size += len(message)
        except grpc.aio.AioRpcError as error:
            return error.code().name, size
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
