"""What the engine says about one request, from the side that waits for it."""

import asyncio
import time
from dataclasses import dataclass

from tgis.errors import RequestError
from tgis.ipc.messages import Request, StopReason, TokenFacts


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of a request; `token` is -1 where it ended without one."""

    token: int
    end: StopReason
    facts: TokenFacts | None


@dataclass(slots=True)
class Times:
    """When things happened to a request, as seen here: `time.monotonic()` values, 0 for not yet."""

    submitted: float
    joined: float = 0.0  # a batch
    first: float = 0.0  # token
    newest: float = 0.0  # token


class Inbox:
    """What the engine has said about one request and its owner has not yet taken."""

    def __init__(self, request: Request, *, eager: bool) -> None:
        self.request = request
        self.input_facts: list[TokenFacts] = []
        self.times = Times(submitted=time.monotonic())
        self._eager = eager  # whether the owner wants every token at once, or all at the end
        self._events: list[TokenEvent] = []
        self._error: RequestError | None = None
        self._finished = False
        self._wake: asyncio.Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def put(self, event: TokenEvent) -> None:
        """Add a token."""
        self._events.append(event)
        self.times.newest = time.monotonic()
        self.times.first = self.times.first or self.times.newest
        self._finished = event.end is not StopReason.NOT_FINISHED
        if self._eager or self._finished:
            self._notify()

    def fail(self, error: RequestError) -> None:
        """End the request with an error, after the tokens it has got."""
        self._error = error
        self._finished = True
        self._notify()

    async def take(self) -> list[TokenEvent]:
        """All tokens that have gathered, at least one; raises the request's error once they are taken."""
        while not self._ready():
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        events, self._events = self._events, []
        if not events and self._error is not None:
            raise self._error
        return events

    def _ready(self) -> bool:
        return self._finished or (self._eager and bool(self._events))

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
