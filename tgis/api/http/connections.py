"""The connections of an HTTP port: bounded in number, in the size of a head, and in how long they wait for clients.

At the limit, one more connection closes the oldest of those that wait. A connection whose request is complete stays
open as long as its client reads.
"""

import asyncio
import logging
import math
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, cast

import msgspec
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from tgis.api.clients import Clients
from tgis.api.http.operations import HttpError
from tgis.config import Config
from tgis.errors import ClientTimeout, RequestError, Unavailable

REQUESTS_AT_A_TIME = 2  # begin in an iteration of the event loop, so that calls of gRPC's go on between them
KEEPALIVE_SECONDS = 75.0  # without a request, after which a connection is closed
MAX_HEAD_BYTES = 1 << 15  # of a request's headers
LINGER_SECONDS = 1.0  # for a client to stop sending an unwanted body
READ_BUFFER_BYTES = 1 << 15  # of a body that nobody reads yet
_READ_AHEAD_BYTES = 1 << 19  # of a body, that arrive before the handler of a head begins
MISFRAMED = "the body is not framed as its headers say"
_NO_REQUEST = msgspec.json.encode({"error": "what arrived is no HTTP request", "error_type": "bad_request"})
_BAD_REQUEST = b"\r\n".join((
    b"HTTP/1.1 400 Bad Request", b"Content-Type: application/json", b"Content-Length: %d" % len(_NO_REQUEST),
    b"Connection: close", b"", _NO_REQUEST,
))  # fmt: skip

log = logging.getLogger(__name__)


class Connections:
    """The open connections of one port."""

    def __init__(self, config: Config, clients: Clients) -> None:
        self.config = config
        self.clients = clients
        self._open: dict[Connection, None] = {}  # the oldest first
        self._turns: deque[asyncio.Future[None]] = deque()  # requests that have yet to begin

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

    async def turn(self) -> None:
        """Return in an iteration of the event loop that begins few other requests."""
        loop = asyncio.get_running_loop()
        if not self._turns:
            loop.call_soon(self._begin)
        turn = loop.create_future()
        self._turns.append(turn)
        await turn

    def _begin(self) -> None:
        for _ in range(min(REQUESTS_AT_A_TIME, len(self._turns))):
            turn = self._turns.popleft()
            if not turn.done():  # its client has not gone
                turn.set_result(None)
        if self._turns:
            asyncio.get_running_loop().call_soon(self._begin)


class _Parser:
    """aiohttp's parser. It would go on after an error, with what it got in the text of each one."""

    def __init__(self, parser: Any, on_error: Callable[[], None]) -> None:
        self._wrapped = parser
        self._on_error = on_error  # which lets nothing more arrive

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def feed_data(self, data: bytes) -> tuple[Any, bool, bytes]:
        try:
            found: tuple[Any, bool, bytes] = self._wrapped.feed_data(data)
        except HttpProcessingError:  # aiohttp would keep it in a frame that it has
            self._on_error()
            return (), False, b""
        return found


class Connection(web.RequestHandler):
    """A connection of aiohttp's that knows what it waits for."""

    __slots__ = ("_answers", "_body", "_connections", "_resumes", "call_until", "client", "clients", "received")

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
        self._connections, self.clients = connections, connections.clients
        self._answers = False  # a request whose head is complete
        self._body: StreamReader | None = None  # while it arrives
        self.received = 0  # bytes: first those of a head, then those of a body
        self._resumes = False
        self.call_until: asyncio.Timeout | None = None  # of a call to an API, while it runs
        with suppress(AttributeError):  # a private name of aiohttp's
            self._parser = cast("Any", _Parser(self._parser, self._refuse))

    @classmethod
    def of(cls, request: web.Request) -> "Connection":
        return cast("Connection", request.protocol)

    @property
    def waits(self) -> bool:
        """Whether it waits for a head or a body, or for the client to read."""
        return not self._answers or self._body is not None or self in self.clients.reading

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """The head of a request is there; when it is its turn, it is answered until the end of the block."""
        self.clients.sending.remove(self)
        self.clients.started(self)
        self._answers, self.received = True, 0
        try:
            await self._connections.turn()
            yield
        finally:
            self.clients.finished(self)
            self._answers, self.received = False, 0

    @contextmanager
    def receiving_body(self, body: StreamReader) -> Iterator[None]:
        """The body of a request arrives; reading it raises TimeoutError with the reason if it cannot go on."""
        self._body = body
        try:
            with self.clients.sending.entered(self):
                yield
        finally:
            self._body = None

    def end(self, error: RequestError | None) -> None:
        """End a call whose body is late with the error, and one of an API at the end of the server; else close the
        connection: what has not been sent is dropped.
        """
        if self._body is not None and isinstance(error, ClientTimeout):
            self._end_body(ClientTimeout(error.detail))
            return
        if self.call_until is not None and isinstance(error, Unavailable):
            self.call_until.reschedule(0)
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
        if data and not self._answers:
            if self not in self.clients.sending:
                self.clients.connecting.remove(self)
                self.clients.sending.add(self)
            if self.received > MAX_HEAD_BYTES + _READ_AHEAD_BYTES:
                self.end(None)
                return
        self.received += len(data)
        super().data_received(data)

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Parse what has arrived meanwhile in another iteration of the event loop: small chunks take long."""
        if not resume_parser:
            super().resume_reading(resume_parser)
        elif not self._resumes:
            self._resumes = True
            asyncio.get_running_loop().call_soon(self._resume_reading)

    def _resume_reading(self) -> None:
        self._resumes = False
        super().resume_reading()

    def _refuse(self) -> None:
        """End with bytes that are no request: no others are read."""
        if self._body is not None:
            self._end_body(HttpError(400, MISFRAMED))
        self.close()  # after an answer that is due
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._say_why)

    def _say_why(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(_BAD_REQUEST)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            # to a client that still sends, the answer would be lost if this end closed at once
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self.force_close)

    def _end_body(self, error: RequestError) -> None:
        assert self._body is not None
        self._body.set_exception(TimeoutError(error))  # what aiohttp expects when it reads on after the answer

    def pause_writing(self) -> None:
        self.clients.reading.add(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self.clients.reading.remove(self)
        super().resume_writing()
