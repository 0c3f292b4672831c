"""Who is connected, what waits for whom, and what each client holds: for gRPC and HTTP alike.

A client is who a caller has proven to be, or its address. Nobody waits for room: a call that finds none is refused.
What waits for a client, to send or to read, holds memory; it is bounded in time and in number.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol, Self

from tgis.config import Config
from tgis.errors import ClientTimeout, InvalidRequest, Overloaded, RequestError, Unavailable

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096  # of gRPC, and of each HTTP port
MESSAGE_BYTE = 2  # bytes of memory for each of a message: received, and in a string
MAX_UNREAD_BYTES = 64 << 20  # of outputs that are complete and have no place any more
MAX_RECEIVING_BYTES = 256 << 20  # of messages that arrive slowly
MAX_SLOW_CALLS = 1024  # whose clients do not read, and as many that have nothing to say
SLOW_SECONDS = 0.5
_SWEEP_SECONDS = 0.25
_PAUSE_SECONDS = 1.0  # a sweep that is later than this one follows a pause of this process
LAST_WORD_SECONDS = 1.0  # for clients to read that their calls end with the server
_STALL_SECONDS = 2.0  # a client that has not read for so long does not delay the end of the server
_QUIET_SECONDS = 0.25  # after the last call: another may be on its way
_AWAKE_SECONDS = 1.0  # after the last call

CountCall = Callable[[str, str, str], object]  # called at the end of each call with its API, method and status


class Waiter(Protocol):
    """A call or connection that can wait for its client."""

    client: str

    def end(self, error: RequestError | None) -> None:
        """End it with an error; with None at once, since the client does not read."""


@dataclass(slots=True, eq=False)
class Waiting:
    """What waits for clients in one way, and how long and how many may."""

    late: str  # what is told after `seconds`, when each is ended
    seconds: float
    crowd: str  # what is told those that are too many
    limit: int  # of those that have waited for `crowd_seconds`; the others are ended
    crowd_seconds: float = SLOW_SECONDS
    told: bool = True
    awake: asyncio.Event = field(default_factory=asyncio.Event)  # set when anything begins to wait
    _since: dict[Waiter, float] = field(default_factory=dict)  # the oldest first

    def add(self, waiter: Waiter) -> None:
        self._since[waiter] = time.monotonic()
        self.awake.set()

    def remove(self, waiter: Waiter) -> bool:
        """Return whether it has waited."""
        return self._since.pop(waiter, None) is not None

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._since

    @contextmanager
    def entered(self, waiter: Waiter) -> Iterator[None]:
        """Let it wait until the end of the block."""
        self.add(waiter)
        try:
            yield
        finally:
            self.remove(waiter)

    def longer_than(self, seconds: float) -> list[Waiter]:
        """The waiters that have waited so long, the oldest first."""
        since = time.monotonic() - seconds
        return [waiter for waiter, began in takewhile(lambda item: item[1] <= since, self._since.items())]

    def restart(self) -> None:
        """Let all begin to wait now."""
        self._since.update(dict.fromkeys(self._since, time.monotonic()))

    def sweep(self) -> None:
        """End those that have waited too long, and those that are too many."""
        if late := self.longer_than(self.seconds):
            self._end(late, ClientTimeout(f"{self.late} {self.seconds:g} s"))
        crowd = self.longer_than(self.crowd_seconds)
        if len(crowd) > self.limit:
            self._end(_too_many(crowd, self.limit), Overloaded(self.crowd))

    def _end(self, waiters: list[Waiter], error: RequestError) -> None:
        for waiter in waiters:
            self.remove(waiter)
            waiter.end(error if self.told else None)
        log.info("ended %d calls: %s", len(waiters), error.detail)


class Clients:
    """All clients of a server."""

    def __init__(self, config: Config) -> None:
        max_inputs, max_memory = config.max_concurrent_requests, config.max_call_memory_mb << 20
        max_of_client = min(config.max_concurrent_requests_per_client or max_inputs, max_inputs)
        self.inputs = Quota(max_inputs, max_of_client, "{} inputs in flight", "{} inputs of this client in flight")
        self.memory = Quota(max_memory, max_memory // 2, "calls hold {} bytes", "calls of this client hold {} bytes")
        self.max_connections = MAX_CONNECTIONS
        self.draining = False  # the server is about to end: what is refused now does not delay that
        self.unread_bytes = 0
        self.awake = asyncio.Event()  # not set: nothing happens, so nothing need be watched
        max_receiving = max(MAX_RECEIVING_BYTES // config.grpc_max_message_bytes, 1)
        self.connecting = Waiting(
            "no request has arrived within", config.client_timeout_seconds,
            "too many connections", self.max_connections, awake=self.awake,
        )  # fmt: skip
        self.sending = Waiting(
            "the message has not arrived within", config.client_timeout_seconds,
            "too many messages arrive slowly", max_receiving, awake=self.awake,
        )  # fmt: skip
        self.reading = Waiting(
            "the client has not read for", config.client_timeout_seconds,
            f"more than {MAX_SLOW_CALLS} calls are not read", MAX_SLOW_CALLS, told=False, awake=self.awake,
        )  # fmt: skip
        self.idle = Waiting(
            "nothing has happened for", float("inf"),
            f"more than {MAX_SLOW_CALLS} calls watch health", MAX_SLOW_CALLS, crowd_seconds=0, awake=self.awake,
        )  # fmt: skip
        self._by_address = config.limit_by_address
        self._waiting = (self.connecting, self.sending, self.reading, self.idle)
        self.served: set[Waiter] = set()  # the end of the server waits for them
        self._last_end = 0.0

    def account(self, identity: bytes, address: str) -> "Account":
        """An account of who a caller has proven to be; of its address if LIMIT_BY_ADDRESS and nothing is proven."""
        return Account(self, identity or (address.encode() if self._by_address else b""))

    def started(self, call: Waiter) -> None:
        """Let the end of the server wait for a call, unless it has begun."""
        if not self.draining:
            self.served.add(call)

    def finished(self, call: Waiter) -> None:
        """Let the end of the server wait for it no longer."""
        if call in self.served:
            self.served.remove(call)
            self._last_end = time.monotonic()

    def forget(self, call: Waiter, _task: object = None) -> None:
        """The call has ended, or the connection is closed; also a callback of the call's task."""
        for waiting in self._waiting:
            waiting.remove(call)
        self.finished(call)

    async def wait_until_idle(self) -> None:
        """Return when all calls have ended but those whose clients do not read."""
        while self._is_active():
            await asyncio.sleep(0.02)

    async def end_calls(self) -> None:
        """End all calls with Unavailable, and give their clients a moment to read that."""
        for call in list(self.served):
            call.end(Unavailable("the server is shutting down"))
        until = time.monotonic() + LAST_WORD_SECONDS
        while self.served and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def _is_active(self) -> bool:
        stalled = self.served.intersection(self.reading.longer_than(_STALL_SECONDS))
        return len(self.served) > len(stalled) or time.monotonic() - self._last_end < _QUIET_SECONDS

    def _is_quiet(self) -> bool:
        """Whether no call is open but those that have nothing to say, and none has been for a second."""
        waits = any(waiting.longer_than(0) for waiting in self._waiting if waiting is not self.idle)
        return not (waits or self.served) and time.monotonic() - self._last_end > _AWAKE_SECONDS

    async def sweep_forever(self) -> None:
        """End what waits for too long, and what is too much; rest while nothing happens."""
        while True:
            if self._is_quiet():
                self.awake.clear()
            await self.awake.wait()
            due = time.monotonic() + _SWEEP_SECONDS
            await asyncio.sleep(_SWEEP_SECONDS)
            paused = time.monotonic() - due > _PAUSE_SECONDS  # in which no client could go on
            for waiting in self._waiting:
                if paused:
                    waiting.restart()
                try:
                    waiting.sweep()
                except Exception:  # the next one may succeed
                    log.exception("what waits for clients could not be ended")


class Account:
    """What one call holds; it is given back when the block is left."""

    def __init__(self, clients: Clients, client: bytes) -> None:
        """An empty `client`: nobody knows which."""
        self.client = client
        self._clients = clients
        self._memory = 0
        self._places = 0
        self._unread_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.give_back_places()
        self._clients.memory.give_back(self.client, self._memory)
        self._memory = 0

    @property
    def max_inputs(self) -> int:
        """How many inputs a call of this client can have at any time."""
        inputs = self._clients.inputs
        return inputs.per_client if self.client else inputs.limit

    def charge(self, num_bytes: int) -> None:
        """Hold more memory until the call ends; InvalidRequest if it can never have so much, else Overloaded."""
        limit = self._clients.memory.per_client
        if self._memory + num_bytes > limit:
            text = f"the call takes {self._memory + num_bytes} bytes of memory, at most {limit} allowed"
            raise InvalidRequest("", text)
        self._clients.memory.take(self.client, num_bytes)
        self._memory += num_bytes

    def take_places(self, num_inputs: int) -> None:
        """Hold places for inputs in flight; Overloaded if there are too few, Unavailable at the end of the server."""
        if self._clients.draining:
            raise Unavailable("the server is shutting down")
        self._clients.inputs.take(self.client, num_inputs)
        self._places = num_inputs

    def output_complete(self, unread_bytes: int) -> None:
        """Give the places back although the client has yet to read so much, unless too much is unread already."""
        if self._clients.unread_bytes + unread_bytes <= MAX_UNREAD_BYTES:
            self.give_back_places()
            self._clients.unread_bytes += unread_bytes
            self._unread_bytes = unread_bytes

    def give_back_places(self) -> None:
        """Hold no places any more."""
        self._clients.inputs.give_back(self.client, self._places)
        self._clients.unread_bytes -= self._unread_bytes
        self._places = self._unread_bytes = 0


class Quota:
    """What all clients together may hold of something, and each of them."""

    def __init__(self, limit: int, per_client: int, text: str, client_text: str) -> None:
        """The texts are for errors; {} is what is held."""
        self.limit, self.per_client = limit, per_client
        self.held: Counter[bytes] = Counter()  # by client
        self._text, self._client_text = text, client_text

    def take(self, client: bytes, amount: int) -> None:
        """Hold more of it; Overloaded if there is not so much. Callers that nobody knows share only the whole."""
        for held, limit, text in (
            (self.held[client] if client else 0, self.per_client, self._client_text),
            (self.held.total(), self.limit, self._text),
        ):
            if held + amount > limit:
                raise Overloaded(f"{text.format(held)}, at most {limit} allowed")
        self.held[client] += amount

    def give_back(self, client: bytes, amount: int) -> None:
        self.held[client] -= amount
        if not self.held[client]:
            del self.held[client]


def _too_many(waiters: list[Waiter], limit: int) -> list[Waiter]:
    """Choose those to end so that `limit` remain: repeatedly the oldest one of the client with the most."""
    rank = {}  # of each among those of its client, the newest first
    counts: Counter[str] = Counter()
    for waiter in reversed(waiters):
        counts[waiter.client] += 1
        rank[waiter] = counts[waiter.client]
    return sorted(waiters, key=rank.__getitem__, reverse=True)[: len(waiters) - limit]
