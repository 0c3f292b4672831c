"""Tokens of the requests of one call on their way from the engine client to the call that waits for them."""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tgis.errors import RequestError
from tgis.ipc.request import Request, StopReason, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tgis.ipc.messages import PromptLogprobs


@dataclass(slots=True)
class RequestTimings:
    """When things happened to a request, as seen here: `time.monotonic()` values, 0 for not yet."""

    arrived: float  # the call
    submitted: float
    scheduled: float = 0.0  # for its first step
    first_token: float = 0.0
    last_token: float = 0.0  # or the end, if it came without one


class Inbox:
    """What the engine sends to one call: a queue for each of its requests, and which of them have something new."""

    def __init__(self, requests: "Sequence[Request]", *, eager: bool, arrived: float) -> None:
        """An eager call wants the tokens of every step at once, any other wants all of them at the end."""
        self.eager = eager
        self.queues = [OutputQueue(request, index, self, arrived) for index, request in enumerate(requests)]
        self.on_end: Callable[[], None] | None = None  # called when the engine is done with all requests
        self._num_open = len(requests)
        self._new: dict[OutputQueue, None] = {}  # a set that keeps their order
        self._waiter: asyncio.Future[None] | None = None

    def add(self, queue: "OutputQueue") -> None:
        """Give this queue to the call, which takes all that is in it by then."""
        self._new[queue] = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> "OutputQueue":
        """Wait for a queue with new tokens, the end of its request or its error."""
        if not self._new:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        queue = next(iter(self._new))
        del self._new[queue]
        return queue

    def end_one(self) -> None:
        """The engine is done with one of the requests."""
        self._num_open -= 1
        if not self._num_open and self.on_end is not None:
            self.on_end()

    def close(self) -> None:
        """Let go of what leads back here, by a traceback or by the outputs: else all of them are garbage cycles."""
        for queue in self.queues:
            queue.error = None
        self.queues, self.on_end = [], None
        self._new.clear()


class OutputQueue:
    """What the engine has generated for one request and the call has not taken yet."""

    def __init__(self, request: Request, index: int, inbox: Inbox, arrived: float) -> None:
        self.request = request
        self.index = index  # among the requests of the call
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.timings = RequestTimings(arrived, submitted=time.monotonic())
        self.num_tokens = 0  # that the engine has generated
        self.new_tokens: list[int] = []  # not taken yet
        self.new_logprobs: list[TokenLogprobs] = []  # one per new token, or none at all
        self.num_steps = 0  # that the new tokens are from
        self.stop_reason = StopReason.NOT_FINISHED  # after the last new token
        self.error: RequestError | None = None  # after the last new token; None once the call has ended
        self.failed: type[RequestError] | None = None  # in the engine
        self._inbox = inbox

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
        if self._inbox.eager or stop_reason:
            self._inbox.add(self)
        if stop_reason:
            self._inbox.end_one()

    def fail(self, error: RequestError) -> None:
        """End the request with an error, raised once the tokens so far have been taken."""
        self.error, self.failed = error, type(error)
        self._inbox.add(self)
        self._inbox.end_one()

    def take(self) -> tuple[list[int], list[TokenLogprobs]]:
        """Take the new tokens and their logprobs."""
        taken = self.new_tokens, self.new_logprobs
        self.new_tokens, self.new_logprobs, self.num_steps = [], [], 0
        return taken
