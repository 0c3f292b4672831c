"""Sends the requests and times the responses. Uses only what every fmaas server supports.

Per message it only reads the clock and keeps a few numbers; the figures are computed afterwards.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

import grpc.aio

from tgis.bench.workload import BenchRequest
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

SETUP_TIMEOUT = 30.0
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one target share one connection
    ("grpc.max_receive_message_length", 64 << 20),
]


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds of `perf_counter`; status "" means unfinished."""

    scheduled_at: float  # according to the load
    requested_tokens: int  # output tokens wanted
    sent_at: float = 0.0
    first_output_at: float = 0.0  # 0: no output yet; always in unary calls
    last_output_at: float = 0.0
    ended_at: float = 0.0
    max_gap: float = 0.0  # longest time between two messages with output
    first_message_tokens: int = 0  # in the first message with output
    output_tokens: int = 0
    input_tokens: int = 0
    status: str = ""
    detail: str = ""  # the server's error message

    def fail(self, now: float, error: grpc.aio.AioRpcError) -> None:
        self.ended_at, self.status, self.detail = now, error.code().name, error.details() or ""

    def record_message(self, now: float, message: pb.GenerationResponse) -> None:
        """Record a message of a stream; messages without output do not change the times."""
        tokens = message.generated_token_count
        if message.input_token_count:
            self.input_tokens = message.input_token_count
        if tokens == self.output_tokens and not message.text:
            return
        if not self.first_output_at:
            self.first_output_at, self.first_message_tokens = now, tokens
        elif now - self.last_output_at > self.max_gap:
            self.max_gap = now - self.last_output_at
        self.last_output_at, self.output_tokens = now, tokens


@dataclass(frozen=True, slots=True)
class CallOptions:
    """How to call the server."""

    deadline: float = 600.0  # seconds that each request may take
    credentials: grpc.ChannelCredentials | None = None  # of TLS
    tls_arguments: Sequence[tuple[str, str]] = ()  # of channels with TLS
    metadata: Sequence[tuple[str, str]] = ()
    adapter_id: str | None = None
    prefix_id: str | None = None


@asynccontextmanager
async def connect(target: str, connections: int, options: CallOptions) -> AsyncIterator["Client"]:
    """A client with this many connections, closed at the end."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(target, options)) for _ in range(connections)]
        yield Client(channels, options)


def _channel(target: str, options: CallOptions) -> grpc.aio.Channel:
    if options.credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, options.credentials, [*CHANNEL_OPTIONS, *options.tls_arguments])


class Client:
    """Calls one server, over its connections in turn."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], options: CallOptions) -> None:
        self._options = options
        self._stubs = [GenerationServiceStub(channel) for channel in channels]
        self._next_stub = itertools.cycle(self._stubs)

    async def model_info(self) -> pb.ModelInfoResponse:
        """The server's model info; all zero if it does not implement the call.

        Opens every connection. RpcError if the server does not answer.
        """
        answers = await asyncio.gather(*(self._model_info(stub) for stub in self._stubs))
        return answers[0]

    async def _model_info(self, stub: GenerationServiceStub) -> pb.ModelInfoResponse:
        try:
            answer = await stub.ModelInfo(pb.ModelInfoRequest(), timeout=SETUP_TIMEOUT, metadata=self._options.metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return pb.ModelInfoResponse()
            raise
        assert isinstance(answer, pb.ModelInfoResponse)
        return answer

    async def token_counts(self, texts: Sequence[str]) -> list[int] | None:
        """Token count of each text, special tokens included; None if the server cannot count."""
        request = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=text) for text in texts])
        try:
            answer = await next(self._next_stub).Tokenize(
                request, timeout=SETUP_TIMEOUT, metadata=self._options.metadata
            )
        except grpc.aio.AioRpcError:
            return None
        counts = [response.token_count for response in answer.responses]
        return counts if len(counts) == len(texts) else None

    async def stream(self, job: BenchRequest, params: pb.Parameters, sample: RequestRecord) -> None:
        """Send a GenerateStream call and fill in its record."""
        options = self._options
        request = pb.SingleGenerationRequest(
            request=pb.GenerationRequest(text=job.text),
            params=params,
            adapter_id=options.adapter_id,
            prefix_id=options.prefix_id,
        )
        sample.sent_at = perf_counter()
        try:
            stub = next(self._next_stub)
            async for message in stub.GenerateStream(request, timeout=options.deadline, metadata=options.metadata):
                sample.record_message(perf_counter(), message)
        except grpc.aio.AioRpcError as error:
            sample.fail(perf_counter(), error)
        else:
            sample.ended_at, sample.status = perf_counter(), "OK"

    async def unary(self, job: BenchRequest, params: pb.Parameters, sample: RequestRecord) -> None:
        """Send a Generate call with one input and fill in its record."""
        options = self._options
        request = pb.BatchedGenerationRequest(
            requests=[pb.GenerationRequest(text=job.text)],
            params=params,
            adapter_id=options.adapter_id,
            prefix_id=options.prefix_id,
        )
        sample.sent_at = perf_counter()
        try:
            stub = next(self._next_stub)
            answer = await stub.Generate(request, timeout=options.deadline, metadata=options.metadata)
        except grpc.aio.AioRpcError as error:
            sample.fail(perf_counter(), error)
            return
        sample.ended_at, sample.status = perf_counter(), "OK"
        sample.input_tokens = sum(response.input_token_count for response in answer.responses)
        sample.output_tokens = sum(response.generated_token_count for response in answer.responses)
