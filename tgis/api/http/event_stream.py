"""Server-sent events: the answer to one request, written as it grows."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from aiohttp import web

from tgis.api.http.operations import ErrorFormat
from tgis.errors import RequestError

KEEP_ALIVE_SECONDS = 15.0  # without an event, before a comment says that the stream goes on
_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}


class EventStream:
    """Begins with its first event, or its first comment: until then the answer can be something else."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()
        self._comment: asyncio.Task[None] | None = None  # being written
        self._timer = self._loop.call_later(KEEP_ALIVE_SECONDS, self._keep_alive)

    async def send(self, data: bytes) -> None:
        """Send an event; waits until the client reads, if much is unread."""
        await self._write(b"data: " + data + b"\n\n")

    async def fail(self, error: RequestError, errors: ErrorFormat) -> web.StreamResponse:
        """End a stream that has begun."""
        _, body = errors.convert(error)
        await self.send(msgspec.json.encode(body))
        if errors.last_event:
            await self.send(errors.last_event)
        return self.response

    def close(self) -> None:
        """Write nothing any more."""
        self._timer.cancel()

    async def _write(self, data: bytes) -> None:
        self._written_at = self._loop.time()
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(data)

    def _keep_alive(self) -> None:
        now = self._loop.time()
        if now >= self._written_at + KEEP_ALIVE_SECONDS:
            self._comment = self._loop.create_task(self._write_comment())
            self._written_at = now
        self._timer = self._loop.call_at(self._written_at + KEEP_ALIVE_SECONDS, self._keep_alive)

    async def _write_comment(self) -> None:
        with suppress(ConnectionError):  # the call itself will notice
            await self._write(b":\n\n")
