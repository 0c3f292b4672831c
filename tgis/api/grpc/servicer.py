"""fmaas.GenerationService: converts messages, delegates to the Generator, maps exceptions to status codes."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from tgis.api.grpc import convert, wire
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
Unary = Callable[[bytes, Context], Awaitable[bytes]]


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
            "Generate": _unary_handler(self._generate),
            "GenerateStream": grpc.unary_stream_rpc_method_handler(self._generate_stream),
            "Tokenize": _unary_handler(self._tokenize),
            "ModelInfo": _unary_handler(self._model_info),
        }
        return grpc.method_handlers_generic_handler(GENERATION_SERVICE, methods)

    async def wait_until_idle(self) -> None:
        """Return when all calls have ended but those whose clients have stopped reading."""
        while self._is_active(time.monotonic()):
            await asyncio.sleep(0.02)

    def _is_active(self, now: float) -> bool:
        reading = any(now - since < _STALL_SECONDS for since in self._waiting_since.values())
        return reading or now - self._last_end < _QUIET_SECONDS

    async def _generate(self, data: bytes, context: Context) -> bytes:
        with self._tracked(context):
            generator = self._require_generator()
            message = wire.parse(data, pb.BatchedGenerationRequest, generator.server_info.max_concurrent_inputs)
            identity, deadline = self._identity(context), self._answer_deadline(context)
            call = convert.generate_call(message, identity, logs.correlation_id(), deadline)
            return await convert.generate_reply(await generator.generate(call), generator.slicer)

    async def _generate_stream(self, data: bytes, context: Context) -> None:
        async with _error_boundary(context):
            with self._tracked(context):
                generator = self._require_generator()
                message = wire.parse(data, pb.SingleGenerationRequest, 1)
                call = convert.generate_stream_call(message, self._identity(context), logs.correlation_id())
                async with aclosing(generator.stream(call)) as outputs:
                    async for output in outputs:
                        await self._write(await convert.generation_response(output, generator.slicer), context)

    async def _tokenize(self, data: bytes, context: Context) -> bytes:
        with self._tracked(context):
            generator = self._require_generator()
            message = wire.parse(data, pb.BatchedTokenizeRequest, generator.server_info.max_tokenize_inputs)
            return await convert.tokenize_reply(
                await generator.tokenize(convert.tokenize_call(message)), generator.slicer
            )

    async def _model_info(self, data: bytes, _context: Context) -> bytes:
        wire.parse(data, pb.ModelInfoRequest)
        return convert.model_info_response(self._require_generator().server_info).SerializeToString()

    async def _write(self, message: bytes, context: Context) -> None:
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


def _unary_handler(method: Unary) -> "grpc.RpcMethodHandler[Any, Any]":
    async def call(data: bytes, context: Context) -> bytes | None:
        async with _error_boundary(context):
            return await method(data, context)
        return None  # reached only if the client has disconnected

    return grpc.unary_unary_rpc_method_handler(call)


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
