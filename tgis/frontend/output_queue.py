"""What the engine says about one request, from the side that waits for it."""

import asyncio
import time
from dataclasses import dataclass

from tgis.errors import RequestError
from tgis.ipc.request import Request, StopReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One new token of a request; `token` is -1 where it ended without one."""

    token_id: int
    stop_reason: StopReason
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class RequestTimings:
    """When things happened to a request, as seen here: `time.monotonic()` values, 0 for not yet."""

    submitted: float
    scheduled: float = 0.0  # a batch
    first_token: float = 0.0  # token
    last_token: float = 0.0  # token


class OutputQueue:
    """What the engine has said about one request and its owner has not yet taken."""

    def __init__(self, request: Request, *, eager: bool) -> None:
        self.request = request
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.timings = RequestTimings(submitted=time.monotonic())
        self._eager = eager  # whether the owner wants every token at once, or all at the end
        self._outputs: list[TokenOutput] = []
        self._error: RequestError | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self._error is not None

    def put(self, output: TokenOutput) -> None:
        """Add a token."""
        self._outputs.append(output)
        self.timings.last_token = time.monotonic()
        self.timings.first_token = self.timings.first_token or self.timings.last_token
        self._finished = output.stop_reason is not StopReason.NOT_FINISHED
        if self._eager or self._finished:
            self._notify()

    def fail(self, error: RequestError) -> None:
        """End the request with an error, after the tokens it has got."""
        self._error = error
        self._finished = True
        self._notify()

    async def get(self) -> list[TokenOutput]:
        """All tokens that have gathered, at least one; raises the request's error once they are taken."""
        while not self._ready():
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._outputs = self._outputs, []
        if not events and self._error is not None:
            raise self._error
        return events

    def _ready(self) -> bool:
        return self._finished or (self._eager and bool(self._outputs))

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
