"""A gRPC call as its handler sees it: its message, bounded in size and time, and writes that wait for the client.

Handlers receive their message themselves, so that this can be bounded; on the wire, the call is the same. Messages are
bytes: a method pays for its message before it makes objects of it.
"""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import grpc

from tgis.api.clients import Clients, CountCall
from tgis.api.grpc.fair_queue import FairQueue
from tgis.api.grpc.private import creator
from tgis.api.grpc.status import Context, abort, abort_with, error_boundary, status_name
from tgis.config import Config
from tgis.errors import InvalidRequest, RequestError
from tgis.security.bearer import TokenFile, token_of

T = TypeVar("T")

_SPARE_CALLS = 128  # of a connection, beyond those that may generate: one gateway can fill the server and be refused


class GrpcCall:
    """One call; made in the task of its handler."""

    def __init__(self, context: Context, calls: "GrpcCalls") -> None:
        task, grpc_task = asyncio.current_task(), creator.get()
        assert task is not None
        self.context = context
        self.connection = context.peer()
        self.client: str = context.peer().rpartition(":")[0]  # the port changes with every connection
        self._task = task
        self._refusal: asyncio.Task[None] | None = None
        self._creator = grpc_task() if grpc_task else None
        self._calls = calls
        task.add_done_callback(functools.partial(calls.clients.forget, self))

    async def receive(self, max_bytes: int | None = None) -> bytes:
        """The message of a call that has only one."""
        if (data := await self.next_message(max_bytes)) is None:
            raise InvalidRequest("", "the call has no message")
        self._calls.clients.started(self)
        return data

    async def next_message(self, max_bytes: int | None = None) -> bytes | None:
        """The next message, None at the end; InvalidRequest if it has more than `max_bytes`."""
        data = b""
        try:
            with self._calls.clients.sending.entered(self):
                data = await self.context.read()
        finally:
            self._calls.queue.arrived(self.connection, len(data) if isinstance(data, bytes) else 0)
        if not isinstance(data, bytes):  # grpc.aio.EOF
            return None
        if max_bytes is not None and len(data) > max_bytes:
            raise InvalidRequest("", f"the message has {len(data)} bytes, at most {max_bytes} allowed")
        return data

    async def write(self, message: bytes) -> None:
        """Send a message, which waits until the client reads."""
        reading = self._calls.clients.reading
        reading.add(self)
        try:
            await self.context.write(message)
        finally:
            reading.remove(self)

    async def idle(self, event: Awaitable[T]) -> T:
        """Wait for what may never happen; no reason to keep the server from its end."""
        self._calls.clients.finished(self)
        with self._calls.clients.idle.entered(self):
            return await event

    def end(self, error: RequestError | None) -> None:
        """End the call with the status of an error; with None at once, since a status waits until the client reads.

        gRPC has no function for the latter, but drops calls that nobody holds: neither the task of the handler, nor the
        one that has created it, and waits for the client to cancel.
        """
        if error is not None:
            self._refusal = asyncio.create_task(self._refuse(error))
            return
        if self._creator is not None:
            self._creator.cancel()
        self._task.cancel()

    async def _refuse(self, error: RequestError) -> None:
        with suppress(grpc.aio.AbortError, grpc.aio.InternalError):  # the latter if the client has cancelled the call
            await abort(self.context, error)
        self._task.cancel()


Method = Callable[[bytes, GrpcCall], Awaitable[bytes | None]]  # of the message; what it returns is the answer


class GrpcCalls:
    """The calls of a gRPC port."""

    def __init__(
        self,
        clients: Clients,
        config: Config,
        tokens: TokenFile | None = None,
        on_rejected: Callable[[], None] = lambda: None,
        count: CountCall = lambda *_: None,
    ) -> None:
        """Calls need one of the `tokens`, if there are any and their method is not public."""
        self.clients = clients
        self._tokens, self._on_rejected = tokens, on_rejected
        self._count = count
        self.max_message_bytes = config.grpc_max_message_bytes
        self.max_calls_of_connection = config.max_concurrent_requests + _SPARE_CALLS
        self.queue = FairQueue(self.max_calls_of_connection)

    @asynccontextmanager
    async def open(self, context: Context, name: str, *, public: bool = False) -> AsyncIterator[GrpcCall]:
        """What a handler does before its client only has to read the rest; `name` is the method's."""
        status = grpc.StatusCode.CANCELLED.name
        try:
            async with error_boundary(context):
                if self._tokens is not None and not public and not self._tokens.accepts(token_of(context)):
                    self._on_rejected()
                    await abort_with(context, grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")
                call = GrpcCall(context, self)
                try:
                    yield call
                finally:
                    self.clients.reading.add(call)
            status = grpc.StatusCode.OK.name
        except grpc.aio.AbortError:
            status = status_name(context)
            raise
        finally:
            self._count("grpc", name, status)

    def handler(
        self, name: str, method: Method, *, stream: bool = False, public: bool = False, max_bytes: int | None = None
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """A handler for a method with one message; with `stream` the method writes the messages of its answer."""

        async def handle(_requests: object, context: Context) -> bytes | None:
            async with self.open(context, name, public=public) as call:
                return await method(await call.receive(max_bytes), call)
            return None  # reached only if the client has disconnected

        make = grpc.stream_stream_rpc_method_handler if stream else grpc.stream_unary_rpc_method_handler
        return make(handle)
