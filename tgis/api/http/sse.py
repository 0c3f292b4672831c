"""Server-sent events: the answer to one request, written as it grows."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from tgis.api.http.errors import ErrorFormat
from tgis.errors import RequestError

KEEP_ALIVE_SECONDS = 15.0  # between comments, which keep proxies from closing a stream without events
_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}


class EventStream:
    """Begins with its first event, or its first comment: until then the answer can be something else.

    `convert` makes events of a body, with their names; each is encoded before the next is made.
    """

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self.convert: Callable[[Any], Iterable[tuple[str, Any]]] = lambda body: [("", body)]
        self.response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._request = request
        self._comments = asyncio.create_task(self._keep_alive())

    async def send(self, data: bytes) -> None:
        """Send an event; waits until the client reads, if much is unread."""
        await self.write(_event(data))

    def encode(self, body: Any) -> bytes:
        """The events of a body, which may be an error."""
        return b"".join(_event(msgspec.json.encode(event), name) for name, event in self.convert(body))

    async def fail(self, error: RequestError, errors: ErrorFormat) -> web.StreamResponse:
        """End a stream that has begun."""
        _, body = errors.convert(error)
        await self.write(self.encode(body))
        if errors.last_event:
            await self.send(errors.last_event)
        return self.response

    def close(self) -> None:
        """Write no more comments."""
        self._comments.cancel()

    async def write(self, data: bytes) -> None:
        """Send encoded events."""
        await self.response.prepare(self._request)
        await self.response.write(data)

    async def _keep_alive(self) -> None:
        with suppress(ConnectionError):  # the call itself will notice
            while True:
                await asyncio.sleep(KEEP_ALIVE_SECONDS)
                await self.write(b":\n\n")


def _event(data: bytes, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + data + b"\n\n"
