"""Tokens of one request on their way from the engine client to the call that waits for them."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tgis.errors import RequestError
from tgis.ipc.request import Request, StopReason, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tgis.ipc.messages import PromptLogprobs


@dataclass(slots=True)
class NewTokens:
    """What one or several steps gave a request; no tokens if it ended without another one."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token, or none at all
    stop_reason: StopReason = StopReason.NOT_FINISHED  # after the last token
    merged: bool = False  # several steps, because the consumer was behind

    def extend(self, token_ids: list[int], logprobs: list[TokenLogprobs], stop_reason: StopReason) -> None:
        self.merged = bool(self.token_ids)
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.stop_reason = stop_reason


@dataclass(slots=True)
class RequestTimings:
    """When things happened to a request, as seen here: `time.monotonic()` values, 0 for not yet."""

    arrived: float  # the call
    submitted: float
    scheduled: float = 0.0  # for its first step
    first_token: float = 0.0
    last_token: float = 0.0  # or the end, if it came without one


class OutputQueue:
    """What the engine has generated for one request and the call has not taken yet, merged into one value."""

    def __init__(self, request: Request, *, eager: bool, arrived: float) -> None:
        """An eager consumer wants the tokens of every step at once, any other wants all of them at the end."""
        self.request = request
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.timings = RequestTimings(arrived, submitted=time.monotonic())
        self.num_tokens = 0  # that the engine has generated
        self.ended = False  # the engine is done with the request
        self.failed: type[RequestError] | None = None  # in the engine
        self.on_end: Callable[[], None] | None = None  # called when the engine is done with the request
        self._eager = eager
        self._new = NewTokens()
        self._error: RequestError | None = None
        self._ready = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def put(self, token_ids: list[int], logprobs: list[TokenLogprobs], stop_reason: StopReason) -> None:
        """Add what a step gave, and wake the consumer if it waits for that."""
        self._new.extend(token_ids, logprobs, stop_reason)
        self.num_tokens += len(token_ids)
        self._ready = self._ready or self._eager or bool(stop_reason)
        self.wake_up()
        if stop_reason:
            self._end()

    def fail(self, error: RequestError) -> None:
        """End the request with an error, raised once the tokens so far have been taken."""
        self._error, self.failed = error, type(error)
        self._ready = True
        self.wake_up()
        self._end()

    async def ready(self) -> None:
        """Wait until `get` need not wait."""
        if not self._ready:
            if self._loop is None:  # to ask for it takes a system call
                self._loop = asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            await self._waiter

    async def get(self) -> NewTokens:
        """Wait for new tokens, the end of the request or its error."""
        if not self._ready:
            await self.ready()
        new, self._new = self._new, NewTokens()
        if self._error is None:
            self._ready = False
        elif not new.token_ids:
            raise self._error
        return new

    def close(self) -> None:
        """Let go of what leads back here, by a traceback or by the outputs: else all of them are garbage cycles."""
        self._error = self.on_end = None

    def wake_up(self) -> None:
        """Let the consumer go on, if it waits."""
        if self._ready and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self) -> None:
        self.ended = True
        if self.on_end is not None:
            self.on_end()
