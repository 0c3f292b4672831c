"""Server-sent events: the answer to one request, written as it grows."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from aiohttp import web

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

    @property
    def has_begun(self) -> bool:
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """An event; waits until the client reads, if much is unread."""
        await self._write(b"data: " + data + b"\n\n")

    async def fail(self, error: bytes, last_event: bytes) -> web.StreamResponse:
        """End a stream that has begun."""
        await self.send(error)
        if last_event:
            await self.send(last_event)
        return self.response

    def close(self) -> None:
        """Nothing is written any more."""
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
