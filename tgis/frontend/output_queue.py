"""Tokens of one request on their way from the engine client to the call that waits for them."""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tgis.errors import RequestError
from tgis.ipc.request import Request, StopReason, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from tgis.ipc.messages import PromptLogprobs


@dataclass(slots=True)
class RequestTimings:
    """When things happened to a request, as seen here: `time.monotonic()` values, 0 for not yet."""

    arrived: float  # the call
    submitted: float
    scheduled: float = 0.0  # for its first step
    first_token: float = 0.0
    last_token: float = 0.0  # or the end, if it came without one


class OutputQueue:
    """What the engine has generated for one request and the call has not taken yet."""

    def __init__(self, request: Request, *, eager: bool, arrived: float) -> None:
        """An eager consumer wants the tokens of every step at once, any other wants all of them at the end."""
        self.request = request
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.timings = RequestTimings(arrived, submitted=time.monotonic())
        self.num_tokens = 0  # that the engine has generated
        self.new_tokens: list[int] = []  # not taken yet
        self.new_logprobs: list[TokenLogprobs] = []  # one per new token, or none at all
        self.num_steps = 0  # that the new tokens are from
        self.stop_reason = StopReason.NOT_FINISHED  # after the last new token
        self.failed: type[RequestError] | None = None  # in the engine
        self.on_end: Callable[[], None] | None = None  # called when the engine is done with the request
        self._eager = eager
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether the engine is done with the request."""
        return bool(self.stop_reason) or self.failed is not None

    def put(self, token_ids: list[int], logprobs: list[TokenLogprobs], stop_reason: StopReason) -> None:
        """Add what a step gave."""
        self.new_tokens += token_ids
        self.new_logprobs += logprobs
        self.num_tokens += len(token_ids)
        self.num_steps += 1
        self.stop_reason = stop_reason
        if self._eager or stop_reason:
            self._wake_up()
        if stop_reason and self.on_end is not None:
            self.on_end()

    def fail(self, error: RequestError) -> None:
        """End the request with an error, raised once the tokens so far have been taken."""
        self._error, self.failed = error, type(error)
        self._wake_up()
        if self.on_end is not None:
            self.on_end()

    async def wait(self) -> None:
        """Wait for new tokens, the end of the request or its error."""
        if not (self.ended or (self._eager and self.num_steps)):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def ready(self) -> None:
        """Wait, and raise the error of the request after its last token."""
        await self.wait()
        if self._error is not None and not self.new_tokens:
            raise self._error

    def take(self) -> tuple[list[int], list[TokenLogprobs]]:
        """Take the new tokens and their logprobs."""
        taken = self.new_tokens, self.new_logprobs
        self.new_tokens, self.new_logprobs, self.num_steps = [], [], 0
        return taken

    def close(self) -> None:
        """Let go of what leads back here, by a traceback or by the outputs: else all of them are garbage cycles."""
        self._error = self.on_end = None

    def _wake_up(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
