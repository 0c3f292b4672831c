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

from tgis.bench.workload import Job
from tgis.errors import StartError
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

SETUP_TIMEOUT = 30.0
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one target share one connection
    ("grpc.max_receive_message_length", 64 << 20),
]


@dataclass(slots=True)
class Sample:
    """One request. Times are seconds of `perf_counter`; a status of "" is not finished yet."""

    due: float  # when it should have been sent
    asked: int  # output tokens wanted
    sent: float = 0.0
    first: float = 0.0  # first output; 0 is none, as always in unary calls
    last: float = 0.0  # latest output
    end: float = 0.0  # the call's status
    max_gap: float = 0.0  # longest time between two messages with output
    first_tokens: int = 0  # tokens of the first message with output
    output_tokens: int = 0
    input_tokens: int = 0
    status: str = ""
    detail: str = ""  # what the server said to an error

    def fail(self, now: float, error: grpc.aio.AioRpcError) -> None:
        """The call ended with an error status."""
        self.end, self.status, self.detail = now, error.code().name, error.details() or ""

    def note(self, now: float, message: pb.GenerationResponse) -> None:
        """Keep what a message of a stream says; messages without output leave the times alone."""
        tokens = message.generated_token_count
        if message.input_token_count:
            self.input_tokens = message.input_token_count
        if tokens == self.output_tokens and not message.text:
            return
        if not self.first:
            self.first, self.first_tokens = now, tokens
        elif now - self.last > self.max_gap:
            self.max_gap = now - self.last
        self.last, self.output_tokens = now, tokens


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
        return grpc.aio.insecure_channel(target, options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate)
    return grpc.aio.secure_channel(target, credentials, options=OPTIONS)


class Client:
    """Calls one server, over its connections in turn."""

    def __init__(self, target: str, channels: Sequence[grpc.aio.Channel], deadline: float) -> None:
        self._target, self._deadline = target, deadline
        self._stubs = [GenerationServiceStub(channel) for channel in channels]
        self._turn = itertools.cycle(self._stubs)

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
            answer = await next(self._turn).Tokenize(request, timeout=SETUP_TIMEOUT)
        except grpc.aio.AioRpcError:
            return None
        counts = [response.token_count for response in answer.responses]
        return counts if len(counts) == len(texts) else None

    async def stream(self, job: Job, params: pb.Parameters, sample: Sample) -> None:
        """Send the job as a stream and fill in the sample."""
        request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=job.text), params=params)
        sample.sent = perf_counter()
        try:
            async for message in next(self._turn).GenerateStream(request, timeout=self._deadline):
                sample.note(perf_counter(), message)
        except grpc.aio.AioRpcError as error:
            sample.fail(perf_counter(), error)
        else:
            sample.end, sample.status = perf_counter(), "OK"

    async def unary(self, job: Job, params: pb.Parameters, sample: Sample) -> None:
        """Send the job as a call of one input and fill in the sample."""
        request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=job.text)], params=params)
        sample.sent = perf_counter()
        try:
            answer = await next(self._turn).Generate(request, timeout=self._deadline)
        except grpc.aio.AioRpcError as error:
            sample.fail(perf_counter(), error)
            return
        sample.end, sample.status = perf_counter(), "OK"
        sample.input_tokens = sum(response.input_token_count for response in answer.responses)
        sample.output_tokens = sum(response.generated_token_count for response in answer.responses)
