"""What makes the most of every field of every RPC, and of the routes of HTTP, within the limits of the ports."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tgis.pb import generation_pb2 as pb

MESSAGE_BYTES = 4 << 20  # the default of GRPC_MAX_MESSAGE_BYTES
_BYTES = MESSAGE_BYTES - 4096  # for the field
_BODY_BYTES = 1_999_000  # nearly the default of PAYLOAD_LIMIT
_REFLECTION = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
RPCS: dict[str, type[Message]] = {
    "fmaas.GenerationService/Generate": pb.BatchedGenerationRequest,
    "fmaas.GenerationService/GenerateStream": pb.SingleGenerationRequest,
    "fmaas.GenerationService/Tokenize": pb.BatchedTokenizeRequest,
    "fmaas.GenerationService/ModelInfo": pb.ModelInfoRequest,
    "grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest,
    "grpc.health.v1.Health/Watch": health_pb2.HealthCheckRequest,
    _REFLECTION: reflection_pb2.ServerReflectionRequest,
}


@dataclass(frozen=True, slots=True)
class WorstCase:
    """A call of one RPC, or of a route."""

    method: str  # of a route: POST and the path
    field: str  # or what several fields do together
    data: bytes
    is_slow: bool = False  # seconds of the CPU

    def __str__(self) -> str:
        return f"{self.method.removeprefix('POST').strip().partition('/')[2]} {self.field}"

    @property
    def path(self) -> str:
        """The path of the route; empty for an RPC."""
        return self.method.partition("POST ")[2]


def worst_cases(max_length: int) -> Iterator[WorstCase]:
    """`max_length` is that of the server's inputs."""
    for method, kind in RPCS.items():
        for path, data in _worst_fields(kind.DESCRIPTOR):
            yield WorstCase(method, path, _usual(kind) + data, is_slow=path.endswith("text, long"))
        yield WorstCase(method, "an unknown field", b"\xf8\x07\1" * (_BYTES // 3))
        yield WorstCase(method, "no message at all", b"\xff" * _BYTES)
    yield from _combinations(max_length)
    for path, name, body in _bodies(max_length):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        yield WorstCase(f"POST {path}", name, data, is_slow=name.endswith("of 0.15 MB"))


def _bodies(max_length: int) -> Iterator[tuple[str, str, Any]]:
    longest, most = "a" * (max_length - 64), "a " * (_BODY_BYTES // 2 - 200)
    yield "/tokenize", "a text of 2 MB, which is refused", {"inputs": most}
    yield "/tokenize", "a text of 0.15 MB", {"inputs": most[:150_000]}
    yield "/generate", "a text of 2 MB, truncated", {"inputs": most, "parameters": {"truncate": 8}}
    yield "/generate", "nested arrays", b'{"inputs":' + b"[" * _BODY_BYTES
    details = {"details": True, "top_n_tokens": 5, "max_new_tokens": 32}
    unary = details | {"decoder_input_details": True, "best_of": 2, "do_sample": True}
    yield "/generate", "all details", {"inputs": longest, "parameters": unary}
    yield "/generate_stream", "all details", {"inputs": longest, "parameters": details}
    echoed = {"prompt": [longest] * 4, "echo": True, "logprobs": 5, "max_tokens": 32}
    yield "/v1/completions", "all details of 4 prompts", echoed
    yield "/v1/completions", "the same in a stream", echoed | {"stream": True}
    yield "/v1/completions", "many prompts", {"prompt": [""] * (_BODY_BYTES // 4 - 20)}
    yield "/v1/chat/completions", "a text of 2 MB", {"messages": [{"role": "user", "content": most}]}
    empty = {"role": "user", "content": ""}
    count = _BODY_BYTES // len(json.dumps([empty, empty])) * 2
    yield "/v1/chat/completions", "many messages", {"messages": [empty] * count}
    yield "/chat_tokenize", "a text of 2 MB, which is refused", {"messages": [{"role": "user", "content": most}]}


def _usual(kind: type[Message]) -> bytes:
    """What the field is added to: an input, if there can be one."""
    message: Any = kind()
    if isinstance(message, pb.SingleGenerationRequest):
        message.request.text = "a"
    elif isinstance(message, pb.BatchedGenerationRequest | pb.BatchedTokenizeRequest):
        message.requests.add(text="a")
    data: bytes = message.SerializeToString()
    return data


def _worst_fields(message: Any, path: str = "") -> Iterator[tuple[str, bytes]]:
    """Name and bytes; where a field can be sent more than once it is sent as often as there is room."""
    for field in message.fields:
        name, tag = path + field.name, field.number << 3 | 2
        if field.message_type is not None:
            yield f"{name}, again and again", _many(_delimited(tag, b""))
            yield from ((inner, _delimited(tag, data)) for inner, data in _worst_fields(field.message_type, f"{name}."))
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield f"{name}, long", _delimited(tag, b"a " * (_BYTES // 2))
            yield f"{name}, again and again", _many(_delimited(tag, b""))
        else:
            yield name, _number(field)
            if field.default_value == []:  # a list
                yield f"{name}, millions", _delimited(tag, b"\1" * _BYTES)


def _number(field: FieldDescriptor) -> bytes:
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return _varint(field.number << 3 | 5) + b"\xff\xff\xff\x7f"  # NaN
    most = 1 if field.type in (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM) else 2**31 - 1
    return _varint(field.number << 3) + _varint(most)


def _combinations(max_length: int) -> Iterator[WorstCase]:
    generate, stream, tokenize = list(RPCS)[:3]
    details = pb.ResponseOptions(
        input_text=True,
        generated_tokens=True,
        input_tokens=True,
        token_logprobs=True,
        token_ranks=True,
        top_n_tokens=10,
    )
    params = pb.Parameters(response=details, truncate_input_tokens=max_length - 64)
    params.stopping.max_new_tokens = 32
    longest = pb.GenerationRequest(text="a" * (max_length - 64))
    for count in (1, 32):
        batch = pb.BatchedGenerationRequest(requests=[longest] * count, params=params)
        yield WorstCase(generate, f"all details of {count} inputs", batch.SerializeToString(), is_slow=count > 1)
    single = pb.SingleGenerationRequest(request=longest, params=params)
    yield WorstCase(stream, "all details", single.SerializeToString())
    plain = pb.Parameters(truncate_input_tokens=8)
    for name, size, count in (
        ("one text", _BYTES, 1),
        ("a quarter of that", _BYTES // 4, 1),
        ("many texts", 4000, 1000),
        ("empty texts", 0, 1000),
    ):
        texts = ["a " * (size // 2)] * count
        batch = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text) for text in texts], params=plain)
        yield WorstCase(generate, f"{name}, truncated", batch.SerializeToString(), is_slow=True)
        batch.params.Clear()
        yield WorstCase(generate, f"{name}, too long", batch.SerializeToString(), is_slow=True)
        asked = pb.BatchedTokenizeRequest(return_tokens=True, return_offsets=True)
        asked.requests.extend(pb.TokenizeRequest(text=text) for text in texts)
        yield WorstCase(tokenize, f"{name}, tokens and offsets", asked.SerializeToString(), is_slow=True)
    stops = pb.StoppingCriteria(max_new_tokens=1000, stop_sequences=["a" * 239 + str(i) for i in range(6)])
    batch = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a" * 100)] * 8)
    batch.params.stopping.CopyFrom(stops)
    yield WorstCase(generate, "stop sequences that nearly match", batch.SerializeToString(), is_slow=True)


def _many(data: bytes) -> bytes:
    return data * (_BYTES // len(data))


def _delimited(tag: int, data: bytes) -> bytes:
    return _varint(tag) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])
