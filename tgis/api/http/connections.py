"""The open connections of an HTTP port, and which of them wait for their clients: to send a request, or to read.

Those that wait are bounded in time, and all in number: one more closes the oldest that waits. A connection whose
request is complete stays open as long as its client reads.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, takewhile
from typing import cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tgis.config import Config

KEEPALIVE_SECONDS = 75.0  # without a request, after which a connection is closed
MAX_HEAD_BYTES = 1 << 15  # of a request's headers
LINGER_SECONDS = 1.0  # for a client to stop sending an unwanted body
MAX_RECEIVING_BYTES = 256 << 20  # of bodies that have not arrived completely
READ_BUFFER_BYTES = 1 << 15  # of a body that nobody reads yet
_SWEEP_SECONDS = 0.5
_PAUSE_SECONDS = 1.0  # a sweep that is later than this one follows a pause

log = logging.getLogger(__name__)


class Connections:
    """Those of one port."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._open: dict[Connection, asyncio.Transport] = {}
        # since when they have waited, the oldest first
        self._idle: dict[Connection, float] = {}
        self._sending_head: dict[Connection, float] = {}
        self._unread: dict[Connection, float] = {}
        self._bodies: dict[Connection, int] = {}  # bytes that have arrived of a body that is not complete
        self._receiving_bytes = 0  # of all these

    def __len__(self) -> int:
        return len(self._open)

    def connect(self, server: web.Server) -> asyncio.Protocol:
        """The protocol of a new connection, for which another one may have to make room."""
        if len(self._open) >= self._config.max_connections and not self._close_oldest():
            return _Refused()
        return Connection(server, self)

    def opened(self, connection: "Connection", transport: asyncio.Transport) -> None:
        self._open[connection] = transport
        self._sending_head[connection] = time.monotonic()  # a client connects to send something

    def closed(self, connection: "Connection") -> None:
        self._open.pop(connection, None)
        for waiting in (self._idle, self._sending_head, self._unread):
            waiting.pop(connection, None)
        self._end_body(connection)

    def begins_to_send(self, connection: "Connection") -> None:
        """Take note of bytes, which begin a request if there is none yet."""
        if self._idle.pop(connection, None) is not None:
            self._sending_head[connection] = time.monotonic()

    def is_sending_head(self, connection: "Connection") -> bool:
        return connection in self._sending_head

    def head_received(self, connection: "Connection") -> None:
        self._sending_head.pop(connection, None)

    def answered(self, connection: "Connection") -> None:
        """The next request may come."""
        if connection in self._open:
            self._idle[connection] = time.monotonic()

    @contextmanager
    def receiving_body(self, connection: "Connection") -> Iterator[Callable[[int], None]]:
        """Counts bytes of a body that has yet to arrive; the oldest of those that are too many give way."""
        self._bodies[connection] = 0

        def count(num_bytes: int) -> None:
            if connection in self._bodies:
                self._bodies[connection] += num_bytes
                self._receiving_bytes += num_bytes
            while self._receiving_bytes > MAX_RECEIVING_BYTES:
                self.abort(next(iter(self._bodies)))

        try:
            yield count
        finally:
            self._end_body(connection)

    def _end_body(self, connection: "Connection") -> None:
        self._receiving_bytes -= self._bodies.pop(connection, 0)

    def is_stalled(self, connection: "Connection", seconds: float) -> bool:
        return self._unread.get(connection, math.inf) <= time.monotonic() - seconds

    def writing_paused(self, connection: "Connection") -> None:
        self._unread[connection] = time.monotonic()

    def writing_resumed(self, connection: "Connection") -> None:
        self._unread.pop(connection, None)

    async def sweep_forever(self) -> None:
        """Close connections that wait for too long."""
        while True:
            due = time.monotonic() + _SWEEP_SECONDS
            await asyncio.sleep(_SWEEP_SECONDS)
            now = time.monotonic()
            if now - due > _PAUSE_SECONDS:  # in which no client could go on
                for waiting in (self._sending_head, self._unread):
                    waiting.update(dict.fromkeys(waiting, now))
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        for connection, transport in self._open.items():
            if transport.is_closing():  # once the client has read the rest
                self._unread.setdefault(connection, now)
        late_heads = _waiting_since(self._sending_head, now - self._config.client_timeout_seconds)
        late_readers = _waiting_since(self._unread, now - self._config.client_timeout_seconds)
        for connection in [*late_heads, *late_readers]:
            self.abort(connection)
        if late_readers:
            log.info("closed %d connections whose clients have not read for too long", len(late_readers))

    def _close_oldest(self) -> bool:
        oldest = next(chain(self._idle, self._sending_head, self._bodies, self._unread), None)
        if oldest is not None:
            self.abort(oldest)
        return oldest is not None

    def abort(self, connection: "Connection") -> None:
        """At once: what has not been sent is dropped."""
        if (transport := self._open.get(connection)) is not None:
            transport.abort()
            self.closed(connection)


class Connection(web.RequestHandler):
    """A connection of aiohttp's that says what it waits for."""

    __slots__ = ("_connections", "_head_bytes", "_max_head_bytes")

    def __init__(self, server: web.Server, connections: Connections) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            logger=log,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=KEEPALIVE_SECONDS,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
        )
        self._connections = connections
        self._max_head_bytes = MAX_HEAD_BYTES
        self._head_bytes = 0  # of a head that is not complete

    @classmethod
    def of(cls, request: web.Request) -> "Connection":
        return cast("Connection", request.protocol)

    def receiving_body(self) -> AbstractContextManager[Callable[[int], None]]:
        """While its body arrives, of which the value counts parts."""
        return self._connections.receiving_body(self)

    def is_stalled(self, seconds: float) -> bool:
        """Whether its client has not read for so long that nothing more can be sent to it."""
        return self._connections.is_stalled(self, seconds)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.opened(self, cast("asyncio.Transport", transport))
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._connections.begins_to_send(self)
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count > num_requests:
            self._head_bytes = 0
            self._connections.head_received(self)
        elif self._connections.is_sending_head(self):
            self._head_bytes += len(data)
            if self._head_bytes > self._max_head_bytes:
                self._connections.abort(self)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, HttpProcessingError):
            exc.__traceback__ = None  # a frame there has the error, and the bytes that are no request
        return super().handle_error(request, status, exc, message)

    def pause_writing(self) -> None:
        self._connections.writing_paused(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._connections.writing_resumed(self)
        super().resume_writing()


class _Refused(asyncio.Protocol):
    """Closes its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()


def _waiting_since(waiting: dict[Connection, float], time_: float) -> list[Connection]:
    return [connection for connection, since in takewhile(lambda item: item[1] <= time_, waiting.items())]
