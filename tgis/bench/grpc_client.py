"""fmaas.GenerationService. Uses only what every server of it supports."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter

import grpc.aio

from tgis.bench.client import SETUP_TIMEOUT, CallOptions, RequestRecord, ServedModel
from tgis.bench.workload import BenchRequest
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one target share one connection
    ("grpc.max_receive_message_length", 64 << 20),
]


@asynccontextmanager
async def connect(
    target: str,
    connections: int,
    options: CallOptions,
    headers: Sequence[tuple[str, str]] = (),
    credentials: grpc.ChannelCredentials | None = None,
    tls_arguments: Sequence[tuple[str, str]] = (),
) -> AsyncIterator["GrpcClient"]:
    """A client with this many connections, closed at the end; the last two arguments are those of TLS."""

    def channel() -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(target, credentials, [*CHANNEL_OPTIONS, *tls_arguments])

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel()) for _ in range(connections)]
        yield GrpcClient(channels, options, headers)


class GrpcClient:
    """Calls one server, over its connections in turn."""

    def __init__(
        self, channels: Sequence[grpc.aio.Channel], options: CallOptions, headers: Sequence[tuple[str, str]]
    ) -> None:
        self._options = options
        self._metadata = [(name.lower(), value) for name, value in headers]
        self._stubs = [GenerationServiceStub(channel) for channel in channels]
        self._next_stub = itertools.cycle(self._stubs)

    async def served_model(self) -> ServedModel:
        """Opens every connection. Nothing is known if the server does not implement the call."""
        answers = await asyncio.gather(*(self._model_info(stub) for stub in self._stubs))
        kind = pb.ModelInfoResponse.ModelKind.Name(answers[0].model_kind)
        return ServedModel(None, kind, answers[0].max_sequence_length or None, answers[0].max_new_tokens or None)

    async def _model_info(self, stub: GenerationServiceStub) -> pb.ModelInfoResponse:
        try:
            answer = await stub.ModelInfo(pb.ModelInfoRequest(), timeout=SETUP_TIMEOUT, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return pb.ModelInfoResponse()
            raise
        assert isinstance(answer, pb.ModelInfoResponse)
        return answer

    async def token_counts(self, texts: Sequence[str]) -> list[int] | None:
        request = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text=text) for text in texts])
        try:
            answer = await next(self._next_stub).Tokenize(request, timeout=SETUP_TIMEOUT, metadata=self._metadata)
        except grpc.aio.AioRpcError:
            return None
        counts = [response.token_count for response in answer.responses]
        return counts if len(counts) == len(texts) else None

    async def send(self, job: BenchRequest, record: RequestRecord) -> None:
        record.sent_at = perf_counter()
        try:
            await (self._stream if self._options.stream else self._unary)(job, record)
        except grpc.aio.AioRpcError as error:
            record.fail(perf_counter(), error.code().name, error.details() or "")
        else:
            record.succeed(perf_counter())

    async def _stream(self, job: BenchRequest, record: RequestRecord) -> None:
        options = self._options
        request = pb.SingleGenerationRequest(
            request=pb.GenerationRequest(text=job.text),
            params=self._params(job),
            adapter_id=options.adapter_id,
            prefix_id=options.prefix_id,
        )
        stub = next(self._next_stub)
        async for message in stub.GenerateStream(request, timeout=options.timeout, metadata=self._metadata):
            record_message(record, perf_counter(), message)

    async def _unary(self, job: BenchRequest, record: RequestRecord) -> None:
        options = self._options
        request = pb.BatchedGenerationRequest(
            requests=[pb.GenerationRequest(text=job.text)],
            params=self._params(job),
            adapter_id=options.adapter_id,
            prefix_id=options.prefix_id,
        )
        answer = await next(self._next_stub).Generate(request, timeout=options.timeout, metadata=self._metadata)
        record.input_tokens = sum(response.input_token_count for response in answer.responses)
        record.output_tokens = sum(response.generated_token_count for response in answer.responses)

    def _params(self, job: BenchRequest) -> pb.Parameters:
        fewest = job.output_tokens if self._options.ignore_eos else 0
        return pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=job.output_tokens, min_new_tokens=fewest))


def record_message(record: RequestRecord, now: float, message: pb.GenerationResponse) -> None:
    """Messages without output do not change the times."""
    tokens = message.generated_token_count
    if message.input_token_count:
        record.input_tokens = message.input_token_count
    if tokens != record.output_tokens or message.text:
        record.record_output(now, tokens)
