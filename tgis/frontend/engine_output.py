"""What the engine has sent for the requests of a call, until the call takes it."""

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tgis.errors import RequestError
from tgis.ipc.request import Request, StopReason, TokenLogprobs

if TYPE_CHECKING:
    from tgis.ipc.messages import PromptLogprobs


@dataclass(slots=True)
class RequestTimings:
    """When things happened to a request, as seen here: `time.monotonic()` values, 0 for not yet."""

    arrived: float  # the call
    submitted: float
    scheduled: float = 0.0  # when its first step was planned
    first_token: float = 0.0
    last_token: float = 0.0  # or the end, if it came without one

    @property
    def inference(self) -> float:
        """Seconds from the first step to the last token."""
        return max(self.last_token - self.scheduled, 0.0) if self.scheduled else 0.0


class ReadyOutputs:
    """Indices of the outputs of a call that the engine has sent something for, in the order of arrival."""

    def __init__(self, *, eager: bool) -> None:
        """An eager call wants the tokens of every step at once, any other wants all of them at the end."""
        self._eager = eager
        self._indices: dict[int, None] = {}
        self._waiter: asyncio.Future[None] | None = None

    def add(self, index: int, *, ended: bool) -> None:
        """The engine has sent something for this output, or has finished it."""
        if self._eager or ended:
            self._indices[index] = None
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    async def get(self) -> int:
        """Wait for an output with new tokens, the end of its request or its error."""
        if not self._indices:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        index = next(iter(self._indices))
        del self._indices[index]
        return index


class EngineOutput:
    """The tokens of one request that have arrived, and its end."""

    def __init__(self, request: Request, index: int, ready: ReadyOutputs, arrived: float) -> None:
        """`index` among the outputs of the call, which arrived at `arrived`."""
        self.request = request
        self.index = index
        self.timings = RequestTimings(arrived, submitted=time.monotonic())
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.num_tokens = 0  # ever
        self.num_cached_tokens = 0  # input tokens found in the prefix cache
        self.new_tokens: list[int] = []
        self.new_logprobs: list[TokenLogprobs] = []  # one per new token, or none at all
        self.num_new_steps = 0  # steps that made the new tokens
        self.stop_reason = StopReason.NOT_FINISHED  # after the last new token
        self.error: RequestError | None = None
        self.ended = False
        self._ready = ready

    def put(self, token_ids: list[int], logprobs: list[TokenLogprobs], stop_reason: StopReason, now: float) -> None:
        """Add the result of a step."""
        if token_ids:
            self.timings.first_token = self.timings.first_token or now
        self.timings.last_token = now
        self.new_tokens += token_ids
        self.new_logprobs += logprobs
        self.num_tokens += len(token_ids)
        self.num_new_steps += 1
        self.stop_reason, self.ended = stop_reason, bool(stop_reason)
        self._ready.add(self.index, ended=self.ended)

    def fail(self, error: RequestError) -> None:
        """End the request with an error."""
        self.error, self.ended = error, True
        self._ready.add(self.index, ended=True)
