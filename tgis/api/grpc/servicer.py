"""fmaas.GenerationService: converts messages, delegates to the Generator, maps exceptions to status codes."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from tgis.api.grpc import convert
from tgis.errors import (
    EngineFailure,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    QueueFull,
    RequestError,
    Unavailable,
    Unimplemented,
)
from tgis.frontend.generation import Generator
from tgis.pb import generation_pb2 as pb
from tgis.security.bearer import caller_identity
from tgis.utils import logs

log = logging.getLogger(__name__)

GENERATION_SERVICE = "fmaas.GenerationService"
CORRELATION_ID_KEY = "x-correlation-id"
_QUIET_SECONDS = 0.4  # after the last call: another may be on its way
_STALL_SECONDS = 2.0  # a client that has not read for so long does not delay the end of the server

_STATUS_CODES: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    EngineFailure: grpc.StatusCode.INTERNAL,
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Unary = Callable[[Any, Context], Awaitable[Message]]


class GenerationServicer:
    """The four RPCs; UNAVAILABLE while `generator` is None."""

    def __init__(self, *, bearer_auth: bool = False, deadline_partial: bool = False) -> None:
        self.generator: Generator | None = None
        self._bearer_auth = bearer_auth
        self._deadline_partial = deadline_partial
        self._waiting_since: dict[Context, float] = {}  # of open calls: for the client to read; infinity: not waiting
        self._last_end = 0.0

    def handler(self) -> "grpc.GenericRpcHandler[Any, Any]":
        """The handler to register with a server."""
        methods = {
            "Generate": _unary_handler(self._generate, pb.BatchedGenerationRequest),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(
                self._generate_stream, _deserializer(pb.SingleGenerationRequest), _serialize
            ),
            "Tokenize": _unary_handler(self._tokenize, pb.BatchedTokenizeRequest),
            "ModelInfo": _unary_handler(self._model_info, pb.ModelInfoRequest),
        }
        return grpc.method_handlers_generic_handler(GENERATION_SERVICE, methods)

    async def wait_until_idle(self) -> None:
        """Return when all calls have ended but those whose clients have stopped reading."""
        while self._is_active(time.monotonic()):
            await asyncio.sleep(0.02)

    def _is_active(self, now: float) -> bool:
        reading = any(now - since < _STALL_SECONDS for since in self._waiting_since.values())
        return reading or now - self._last_end < _QUIET_SECONDS

    async def _generate(self, request: pb.BatchedGenerationRequest, context: Context) -> Message:
        call = convert.generate_call(
            request, self._identity(context), logs.correlation_id(), self._answer_deadline(context)
        )
        with self._tracked(context):
            replies = await self._require_generator().generate(call)
        return pb.BatchedGenerationResponse(responses=[convert.generation_response(reply) for reply in replies])

    async def _generate_stream(self, request: pb.SingleGenerationRequest | None, context: Context) -> None:
        async with _error_boundary(context):
            call = convert.generate_stream_call(
                _require_decoded(request), self._identity(context), logs.correlation_id()
            )
            with self._tracked(context):
                async with aclosing(self._require_generator().stream(call)) as replies:
                    async for reply in replies:
                        await self._write(convert.generation_response(reply), context)

    async def _tokenize(self, request: pb.BatchedTokenizeRequest, context: Context) -> Message:
        with self._tracked(context):
            return convert.tokenize_response(await self._require_generator().tokenize(convert.tokenize_call(request)))

    async def _model_info(self, _request: pb.ModelInfoRequest, _context: Context) -> Message:
        return convert.model_info_response(self._require_generator().server_info)

    async def _write(self, message: Message, context: Context) -> None:
        self._mark(context, time.monotonic())
        await context.write(message)
        self._mark(context, math.inf)

    @contextmanager
    def _tracked(self, context: Context) -> Iterator[None]:
        """What a call does before its client only has to read the rest."""
        self._waiting_since[context] = math.inf
        context.add_done_callback(self._ended)  # type: ignore[arg-type]
        try:
            yield
        finally:
            self._mark(context, time.monotonic())

    def _mark(self, context: Context, waiting_since: float) -> None:
        if context in self._waiting_since:
            self._waiting_since[context] = waiting_since

    def _ended(self, context: Context) -> None:
        self._waiting_since.pop(context, None)
        self._last_end = time.monotonic()

    def _identity(self, context: Context) -> bytes:
        return caller_identity(context, bearer_auth=self._bearer_auth)

    def _answer_deadline(self, context: Context) -> float | None:
        remaining = context.time_remaining() if self._deadline_partial else None
        return None if remaining is None else time.monotonic() + remaining

    def _require_generator(self) -> Generator:
        if self.generator is None:
            raise Unavailable("the model is still loading")
        return self.generator


def _unary_handler(method: Unary, request_type: type[Message]) -> "grpc.RpcMethodHandler[Any, Any]":
    async def call(request: Message | None, context: Context) -> Message | None:
        async with _error_boundary(context):
            answer: Message = await method(_require_decoded(request), context)
            return answer
        return None  # reached only if the client has disconnected

    return grpc.unary_unary_rpc_method_handler(call, _deserializer(request_type), _serialize)


@asynccontextmanager
async def _error_boundary(context: Context) -> AsyncIterator[None]:
    """Ends the call with a status for any exception raised in the block; sets its correlation id."""
    correlation_id = dict(context.invocation_metadata() or ()).get(CORRELATION_ID_KEY)
    metadata = ((CORRELATION_ID_KEY, correlation_id),) if correlation_id else ()
    context.set_trailing_metadata(metadata)
    try:
        with logs.correlation_scope(correlation_id):
            try:
                yield
            except RequestError as error:
                await _abort(context, error, metadata)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError:  # the call was cancelled while its response was sent
        log.info("the client disconnected before the response was sent")
    except Exception as error:
        log.exception("internal error in a call")
        await _abort(context, EngineFailure(f"internal error: {type(error).__name__}"), metadata)


async def _abort(context: Context, error: RequestError, metadata: tuple[tuple[str, str], ...]) -> None:
    code = _STATUS_CODES[type(error)]
    status = status_pb2.Status(code=code.value[0], message=str(error))
    for detail in _error_details(error):
        status.details.add().Pack(detail)
    rich = (("grpc-status-details-bin", status.SerializeToString()),) if status.details else ()
    await context.abort(code, str(error), (*metadata, *rich))


def _error_details(error: RequestError) -> Iterator[Message]:
    """The machine-readable details of the error; values that TGIS's message leaves out are only here."""
    match error:
        case InvalidRequest(field=field):
            bad = error_details_pb2.BadRequest()
            bad.field_violations.add(field=convert.field_path(field), description=error.detail)
            yield bad
        case Overloaded(retry_after=seconds):
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(int(seconds * 1000))
            yield retry
            quota = error_details_pb2.QuotaFailure()
            quota.violations.add(description=error.detail)
            yield quota


def _deserializer(request_type: type[Message]) -> Callable[[bytes], Message | None]:
    """A deserializer that returns None for undecodable bytes: gRPC itself would answer INTERNAL."""

    def parse(data: bytes) -> Message | None:
        try:
            return request_type.FromString(data)
        except DecodeError:
            return None

    return parse


def _require_decoded(request: Any) -> Any:
    if request is None:
        raise InvalidRequest("", "the message cannot be decoded")
    return request


def _serialize(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return data
