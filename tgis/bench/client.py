"""The calls, and the time of what comes back. Asks only for what every fmaas server knows.

Per message it does nothing but read the clock and keep a few numbers; figures are made of them afterwards.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter

import grpc.aio

from tgis.bench.workload import BenchRequest
from tgis.errors import StartError
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

SETUP_TIMEOUT = 30.0
CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one target share one connection
    ("grpc.max_receive_message_length", 64 << 20),
]


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds of `perf_counter`; a status of "" is not finished yet."""

    scheduled_at: float  # when it should have been sent
    requested_tokens: int  # output tokens wanted
    sent_at: float = 0.0
    first_output_at: float = 0.0  # first output; 0 is none, as always in unary calls
    last_output_at: float = 0.0  # latest output
    ended_at: float = 0.0  # the call's status
    max_gap: float = 0.0  # longest time between two messages with output
    first_message_tokens: int = 0  # tokens of the first message with output
    output_tokens: int = 0
    input_tokens: int = 0
    status: str = ""
    detail: str = ""  # what the server said to an error

    def fail(self, now: float, error: grpc.aio.AioRpcError) -> None:
        """The call ended with an error status."""
        self.ended_at, self.status, self.detail = now, error.code().name, error.details() or ""

    def record_message(self, now: float, message: pb.GenerationResponse) -> None:
        """Keep what a message of a stream says; messages without output leave the times alone."""
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
class Tls:
    """PEM files' contents: the CA that the server's certificate must come from, and the client's own pair."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


@asynccontextmanager
async def connect(target: str, tls: Tls | None, connections: int, deadline: float) -> AsyncIterator["Client"]:
    """A client with so many connections, closed at the end; `deadline` is seconds for each request."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(target, tls)) for _ in range(connections)]
        yield Client(target, channels, deadline)


def _channel(target: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS)


class Client:
    """Calls one server, over its connections in turn."""

    def __init__(self, target: str, channels: Sequence[grpc.aio.Channel], deadline: float) -> None:
        self._target, self._deadline = target, deadline
        self._stubs = [GenerationServiceStub(channel) for channel in channels]
        self._next_stub = itertools.cycle(self._stubs)

    async def model_info(self) -> pb.ModelInfoResponse:
        """What the server says of its model, all zero if it does not know the call.

        Asked over every connection, so that all are open afterwards. StartError if the server is not there.
        """
        answers = await asyncio.gather(*(self._model_info(stub) for stub in self._stubs))
        return answers[0]

    async def _model_info(self, stub: GenerationServiceStub) -> pb.ModelInfoResponse:
        try:
            answer = await stub.ModelInfo(pb.ModelInfoRequest(), timeout=SETUP_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return pb.ModelInfoResponse()
            raise StartError(f"no answer from {self._target}: {error.code().name}: {error.details()}") from error
        assert isinstance(answer, pb.ModelInfoResponse)
        return answer

    async def token_counts(self, texts: Sequence[str]) -> list[int] | None:
        """Tokens of each text, special tokens included; None if the server cannot tell."""
        request = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=text) for text in texts])
        try:
            answer = await next(self._next_stub).Tokenize(request, timeout=SETUP_TIMEOUT)
        except grpc.aio.AioRpcError:
            return None
        counts = [response.token_count for response in answer.responses]
        return counts if len(counts) == len(texts) else None

    async def stream(self, job: BenchRequest, params: pb.Parameters, sample: RequestRecord) -> None:
        """Send the job as a stream and fill in the sample."""
        request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=job.text), params=params)
        sample.sent_at = perf_counter()
        try:
            async for message in next(self._next_stub).GenerateStream(request, timeout=self._deadline):
                sample.record_message(perf_counter(), message)
        except grpc.aio.AioRpcError as error:
            sample.fail(perf_counter(), error)
        else:
            sample.ended_at, sample.status = perf_counter(), "OK"

    async def unary(self, job: BenchRequest, params: pb.Parameters, sample: RequestRecord) -> None:
        """Send the job as a call of one input and fill in the sample."""
        request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=job.text)], params=params)
        sample.sent_at = perf_counter()
        try:
            answer = await next(self._next_stub).Generate(request, timeout=self._deadline)
        except grpc.aio.AioRpcError as error:
            sample.fail(perf_counter(), error)
            return
        sample.ended_at, sample.status = perf_counter(), "OK"
        sample.input_tokens = sum(response.input_token_count for response in answer.responses)
        sample.output_tokens = sum(response.generated_token_count for response in answer.responses)
