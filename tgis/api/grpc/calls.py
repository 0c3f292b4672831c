"""A gRPC call as its handler sees it: its message, bounded in size and time, and writes that wait for the client.

Handlers receive their message themselves, so that this can be bounded; on the wire, the call is the same. Messages are
bytes: a method pays for its message before it makes objects of it.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from tgis.api.clients import Clients
from tgis.api.grpc.private import creator
from tgis.api.grpc.status import Context, abort, client_address, error_boundary
from tgis.errors import InvalidRequest, RequestError

if TYPE_CHECKING:
    from tgis.api.grpc.fair_queue import FairQueue

T = TypeVar("T")

# gRPC does not say which messages are compressed: no protobuf begins like gzip, and no message of ours like deflate.
_GZIP, _DEFLATE = b"\x1f\x8b", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_EITHER = zlib.MAX_WBITS | 32


class GrpcCall:
    """One call; made in the task of its handler."""

    def __init__(self, context: Context, calls: "GrpcCalls") -> None:
        task, grpc_task = asyncio.current_task(), creator.get()
        assert task is not None
        self.context = context
        self.connection = context.peer()
        self.client = client_address(context)
        self._task = task
        self._refusal: asyncio.Task[None] | None = None
        self._creator = grpc_task() if grpc_task else None
        self._calls = calls

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
        data = await _decompressed(data, self._calls.max_message_bytes)
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


Unary = Callable[[bytes, Context], Awaitable[bytes]]
Stream = Callable[[bytes, GrpcCall], Awaitable[None]]


class GrpcCalls:
    """The calls of a gRPC port."""

    def __init__(self, clients: Clients, queue: "FairQueue[Any]", max_message_bytes: int) -> None:
        self.clients = clients
        self.queue = queue
        self.max_message_bytes = max_message_bytes

    @contextmanager
    def open(self, context: Context) -> Iterator[GrpcCall]:
        """What a handler does before its client only has to read the rest."""
        call = GrpcCall(context, self)
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _task: self.clients.forget(call))
        try:
            yield call
        finally:
            self.clients.reading.add(call)

    def unary_handler(self, method: Unary, max_bytes: int | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
        """A handler for a method that returns the answer."""

        async def handle(_requests: object, context: Context) -> bytes | None:
            async with error_boundary(context):
                with self.open(context) as call:
                    return await method(await call.receive(max_bytes), context)
            return None  # reached only if the client has disconnected

        return grpc.stream_unary_rpc_method_handler(handle)

    def stream_handler(self, method: Stream, max_bytes: int | None = None) -> "grpc.RpcMethodHandler[Any, Any]":
        """A handler for a method that writes the messages of its answer."""

        async def handle(_requests: object, context: Context) -> None:
            async with error_boundary(context):
                with self.open(context) as call:
                    await method(await call.receive(max_bytes), call)

        return grpc.stream_stream_rpc_method_handler(handle)


async def _decompressed(data: bytes, max_bytes: int) -> bytes:
    """Decompress a message in a thread: gRPC itself would do it on the event loop, for some milliseconds each."""
    if not data.startswith((_GZIP, *_DEFLATE)):
        return data
    if data.startswith(_GZIP) and int.from_bytes(data[-4:], "little") > max_bytes:  # as it says itself
        raise _too_large(max_bytes)
    return await asyncio.to_thread(_decompress, data, max_bytes)


def _decompress(data: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj(_EITHER)
    try:
        message = stream.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest("", f"the message cannot be decompressed: {error}") from None
    if len(message) > max_bytes:
        raise _too_large(max_bytes)
    if not stream.eof or stream.unused_data:
        raise InvalidRequest("", "the message cannot be decompressed: it is not one whole stream")
    return message


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest("", f"the message has more than {max_bytes} bytes, decompressed")
