"""The connections of an HTTP port: bounded in number, in the size of a head, and in how long they wait for clients.

At the limit, one more connection closes the oldest of those that wait. A connection whose request is complete stays
open as long as its client reads.
"""

import asyncio
import logging
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from tgis.api.clients import Clients
from tgis.config import Config
from tgis.errors import ClientTimeout, RequestError

KEEPALIVE_SECONDS = 75.0  # without a request, after which a connection is closed
MAX_HEAD_BYTES = 1 << 15  # of a request's headers
LINGER_SECONDS = 1.0  # for a client to stop sending an unwanted body
READ_BUFFER_BYTES = 1 << 15  # of a body that nobody reads yet
_READ_AHEAD_BYTES = 1 << 19  # of a body, that arrive before the handler of a head begins

log = logging.getLogger(__name__)


class Connections:
    """The open connections of one port."""

    def __init__(self, config: Config, clients: Clients) -> None:
        self.config = config
        self.clients = clients
        self._open: dict[Connection, None] = {}  # the oldest first

    def add(self, connection: "Connection") -> None:
        """Count a connection; at the limit the oldest that waits makes room, or the new one is closed."""
        if len(self._open) >= self.clients.max_connections:
            closed = next((each for each in self._open if each.waits), connection)
            closed.end(None)
            if closed is connection:
                return
        self._open[connection] = None
        self.clients.connecting.add(connection)

    def remove(self, connection: "Connection") -> None:
        self._open.pop(connection, None)
        self.clients.forget(connection)


class Connection(web.RequestHandler):
    """A connection of aiohttp's that knows what it waits for."""

    __slots__ = ("_answers", "_body", "_clients", "_connections", "_head_bytes", "client")

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
        self.client = ""
        self._connections, self._clients = connections, connections.clients
        self._answers = False  # a request whose head is complete
        self._body: StreamReader | None = None  # while it arrives
        self._head_bytes = 0  # that have arrived since the last answer, or before the first

    @classmethod
    def of(cls, request: web.Request) -> "Connection":
        return cast("Connection", request.protocol)

    @property
    def waits(self) -> bool:
        """Whether it waits for a head or a body, or for the client to read."""
        return not self._answers or self._body is not None or self in self._clients.reading

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The head of a request is there; until the end of the block it is answered."""
        self._clients.sending.remove(self)
        self._clients.started(self)
        self._answers, self._head_bytes = True, 0
        try:
            yield
        finally:
            self._clients.finished(self)
            self._answers = False

    @contextmanager
    def receiving_body(self, body: StreamReader) -> Iterator[None]:
        """The body of a request arrives; reading it raises TimeoutError when it is late."""
        self._body = body
        try:
            with self._clients.sending.entered(self):
                yield
        finally:
            self._body = None

    def end(self, error: RequestError | None) -> None:
        """End a call whose body is late with the error, or close the connection: what has not been sent is dropped."""
        if self._body is not None and isinstance(error, ClientTimeout):
            self._body.set_exception(TimeoutError(error.detail))
            return
        if self.transport is not None:
            self.transport.abort()
        self._connections.remove(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.client = str((transport.get_extra_info("peername") or ("",))[0])
        # the system ends a connection whose client does not read for so long, even one that is being closed
        milliseconds = math.ceil(self._connections.config.client_timeout_seconds * 1000)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._answers:
            if self not in self._clients.sending:
                self._clients.connecting.remove(self)
                self._clients.sending.add(self)
            if self._head_bytes > MAX_HEAD_BYTES + _READ_AHEAD_BYTES:
                self.end(None)
                return
            self._head_bytes += len(data)
        super().data_received(data)

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
        self._clients.reading.add(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._clients.reading.remove(self)
        super().resume_writing()
