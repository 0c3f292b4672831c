"""gRPC handlers that read their own messages, so that both directions are limited in size and time.

Every method is stream_stream without (de)serializers; on the wire it looks the same as a unary one. A handler gets
bytes and parses them only after the call has been admitted.
"""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from contextvars import ContextVar
from typing import Any

import grpc

from tgis.api.grpc.status import Context, abort, status_name
from tgis.config import Config
from tgis.errors import ClientTimeout, EngineFailure, InvalidRequest, RequestError
from tgis.frontend.admission import Admission, Quota
from tgis.frontend.metrics import CountCall
from tgis.security.bearer import TokenFile, token_of
from tgis.security.identity import caller_identity
from tgis.utils import logs

CORRELATION_ID_KEY = "x-correlation-id"

log = logging.getLogger(__name__)
# grpc.aio quotes metadata that is not UTF-8, tokens included, before any call is seen here.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: not str(record.msg).startswith("Invalid encoding"))

_creator: ContextVar["weakref.ref[asyncio.Task[Any]] | None"] = ContextVar("creator", default=None)


def remember_creators(loop: asyncio.AbstractEventLoop) -> None:
    """Make every task of the loop know the task that created it; `GrpcCall` needs it."""

    def create(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> Any:
        task = asyncio.current_task(loop)
        _creator.set(None if task is None else weakref.ref(task))
        return asyncio.Task(coroutine, loop=loop, **options)

    # typeshed describes the keywords of each Python; `create` hands on whatever there are.
    loop.set_task_factory(create)  # type: ignore[arg-type]


class GrpcCall:
    """One call, for its handler; made in the task of the handler."""

    def __init__(self, context: Context, client: bytes, identity: bytes, timeout: float) -> None:
        """`client` is the key in quotas, `identity` what the caller has proven; `timeout` limits a read and a write."""
        self.context, self.metadata = context, context.invocation_metadata() or ()
        self.client, self.identity = client, identity
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        starter = _creator.get()
        self._tasks = asyncio.current_task(), starter() if starter else None
        self._write_began: float | None = None
        self._timer = self._loop.call_later(timeout, self._check_write)

    def close(self) -> None:
        """The call has ended."""
        self._timer.cancel()

    async def read(self, max_bytes: int | None = None) -> bytes | None:
        """Return the next message, None after the last; ClientTimeout, or InvalidRequest above `max_bytes`."""
        try:
            async with asyncio.timeout(self._timeout):
                data = await self.context.read()
        except TimeoutError:
            raise ClientTimeout(self._timeout) from None
        if not isinstance(data, bytes):  # grpc.aio.EOF
            return None
        if max_bytes is not None and len(data) > max_bytes:
            raise InvalidRequest("", f"the message has {len(data)} bytes, at most {max_bytes} allowed")
        return data

    async def write(self, message: bytes) -> None:
        """Send a message, as soon as the client has room for it; a client that does not read loses the call."""
        self._write_began = self._loop.time()  # asyncio.timeout would take 4 us of the 65 us that a token takes
        await self.context.write(message)
        self._write_began = None

    def _check_write(self) -> None:
        """Cancel a call whose write waits for too long.

        It ends without a status, which would wait for the client as well: C-core cancels a call once grpc.aio drops it,
        i.e. when the task that started the handler has ended, too.
        """
        began = self._write_began or self._loop.time()
        if self._loop.time() < began + self._timeout:
            self._timer = self._loop.call_at(began + self._timeout, self._check_write)
            return
        log.info("a client has not read for %g s", self._timeout)
        for task in filter(None, self._tasks):
            task.cancel()


# Reads the messages and writes the answer.
Run = Callable[[GrpcCall], Awaitable[None]]
# Gets the message and writes the answer.
Method = Callable[[bytes, GrpcCall], Awaitable[None]]


class GrpcCalls:
    """Makes the handlers of a gRPC port."""

    def __init__(
        self,
        config: Config,
        admission: Admission,
        tokens: TokenFile | None = None,
        on_rejected: Callable[[], object] = lambda: None,
        count: CountCall = lambda *_: None,
    ) -> None:
        """Calls need one of the `tokens`, if there are any and their method is not public."""
        self.admission = admission
        self._config = config
        self._tokens, self._on_rejected = tokens, on_rejected
        self._count = count

    def handler(self, name: str, method: Method, quota: Quota | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
        """Make the handler of a method with one request message; `quota` limits its open calls apart from others."""

        async def run(call: GrpcCall) -> None:
            with (quota or self.admission.calls).hold(call.client, 1):
                if (data := await call.read()) is None:
                    raise InvalidRequest("", "the call has no message")
                async with self.admission.running(call.client, len(data)):
                    await method(data, call)

        return self.stream_handler(name, run)

    def stream_handler(self, name: str, run: Run, *, public: bool = False) -> "grpc.RpcMethodHandler[Any, Any]":
        """Make the handler of a method that reads its messages itself; a public one needs no token."""

        async def handle(_requests: object, context: Context) -> None:
            status = grpc.StatusCode.CANCELLED.name
            given = dict(context.invocation_metadata() or ()).get(CORRELATION_ID_KEY, "")
            correlation_id = given if given.isascii() and given.isprintable() else ""
            context.set_trailing_metadata(((CORRELATION_ID_KEY, correlation_id),) if correlation_id else ())
            try:
                with logs.correlation_scope(correlation_id):
                    if given != correlation_id:
                        await abort(context, InvalidRequest("", f"{CORRELATION_ID_KEY} must be printable ASCII"))
                    if (error := await self._outcome(run, context, public=public)) is not None:
                        await abort(context, error)
                status = grpc.StatusCode.OK.name
            except grpc.aio.AbortError:
                status = status_name(context)
                raise
            finally:
                self._count("grpc", name, status)

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _outcome(self, run: Run, context: Context, *, public: bool) -> RequestError | None:
        """Run a call and return its error, without the frames: grpc.aio would keep these, and the message in them."""
        try:
            if not (public or self._tokens is None or self._tokens.accepts(token_of(context))):
                self._on_rejected()
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")
            identity = caller_identity(context, bearer_auth=self._tokens is not None)
            client = self.admission.client(identity, context.peer().rpartition(":")[0])
            with closing(GrpcCall(context, client, identity, self._config.client_timeout_seconds)) as call:
                await run(call)
        except RequestError as error:
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return error
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            raise
        except grpc.aio.BaseError:  # the call was cancelled while its response was sent, or the server has stopped
            log.info("the call has ended before its response was sent")
            raise asyncio.CancelledError from None  # gRPC is about to raise it, and would first try to send a status
        except Exception as error:
            log.exception("internal error in a call")
            return EngineFailure(f"internal error: {type(error).__name__}")
        return None
