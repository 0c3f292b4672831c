"""The client of fmaas.GenerationService, limited to what every server of it supports."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter
from typing import Any

import grpc.aio

from tgis.bench.client import BenchSettings, RequestRecord
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

_SETUP_TIMEOUT = 30.0  # seconds for the first call of each connection
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one target share one connection
    ("grpc.max_receive_message_length", 64 << 20),
]


@asynccontextmanager
async def connect(
    settings: BenchSettings, open_channel: Callable[[], grpc.aio.Channel], headers: Sequence[tuple[str, str]] = ()
) -> AsyncIterator["GrpcClient"]:
    """A client whose connections are open; their channels need CHANNEL_OPTIONS."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(open_channel()) for _ in range(settings.connections)]
        client = GrpcClient(channels, settings, headers)
        await client.open_connections()
        yield client


class GrpcClient:
    """Calls one server, over its connections in turn."""

    def __init__(
        self, channels: Sequence[grpc.aio.Channel], settings: BenchSettings, headers: Sequence[tuple[str, str]]
    ) -> None:
        self._settings = settings
        self._metadata = [(name.lower(), value) for name, value in headers]
        self._stubs = [GenerationServiceStub(channel) for channel in channels]
        self._next_stub = itertools.cycle(self._stubs)

    async def open_connections(self) -> None:
        timeout = min(_SETUP_TIMEOUT, self._settings.timeout)
        requests = (
            stub.ModelInfo(pb.ModelInfoRequest(), timeout=timeout, metadata=self._metadata) for stub in self._stubs
        )
        await asyncio.gather(*requests)

    async def send(self, text: str, record: RequestRecord) -> None:
        record.sent_at = perf_counter()
        try:
            await (self._stream if self._settings.stream else self._unary)(text, record)
        except grpc.aio.AioRpcError as error:
            record.fail(perf_counter(), error.code().name, error.details() or "")
        else:
            record.succeed(perf_counter())

    async def _stream(self, text: str, record: RequestRecord) -> None:
        request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text), **self._fields(record))
        call = next(self._next_stub).GenerateStream(request, timeout=self._settings.timeout, metadata=self._metadata)
        async for message in call:
            record_message(record, perf_counter(), message)

    async def _unary(self, text: str, record: RequestRecord) -> None:
        request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], **self._fields(record))
        call = next(self._next_stub).Generate(request, timeout=self._settings.timeout, metadata=self._metadata)
        (answer,) = (await call).responses
        record.input_tokens, record.output_tokens = answer.input_token_count, answer.generated_token_count

    def _fields(self, record: RequestRecord) -> dict[str, Any]:
        """The fields that streams and unary calls share."""
        most = record.requested_tokens
        stopping = pb.StoppingCriteria(max_new_tokens=most, min_new_tokens=most if self._settings.ignore_eos else 0)
        adapter = {"adapter_id": self._settings.adapter_id, "prefix_id": self._settings.prefix_id}
        return {"params": pb.Parameters(stopping=stopping), **adapter}


def record_message(record: RequestRecord, now: float, message: pb.GenerationResponse) -> None:
    """Messages without output do not change the times."""
    tokens = message.generated_token_count
    if message.input_token_count:
        record.input_tokens = message.input_token_count
    if tokens != record.output_tokens or message.text:
        record.record_output(now, tokens)
