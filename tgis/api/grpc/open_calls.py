"""The open calls, and which of them wait for their clients: to send a message, or to read.

What waits for a client holds no permit, but memory: it is bounded in time and in number. Those that are too many end
with the oldest of the client that has most of them.
"""

import asyncio
import logging
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice, takewhile
from typing import Any, TypeVar

import grpc

from tgis.api.grpc.compression import decompressed
from tgis.api.grpc.status import Context, abort, client_address
from tgis.config import Config
from tgis.errors import ClientTimeout, InvalidRequest, Overloaded, RequestError

T = TypeVar("T")

log = logging.getLogger(__name__)

MAX_RECEIVING_BYTES = 256 << 20  # of messages that arrive slowly
MAX_ARRIVING = 16  # messages at the same time: they are in memory, and have no price before they are there
ARRIVING_SECONDS = 0.1  # one that takes longer arrives slowly, and keeps no other from its turn
SLOW_MESSAGES = 2  # of a connection at the same time: they do not arrive with their calls
LARGE_BYTES = 256 << 10  # to copy such a message takes up to 5 ms of the event loop
MAX_SLOW_CALLS = 1024  # whose clients do not read, and as many that have nothing to say
SLOW_SECONDS = 0.5
CALLS_PER_SLICE = 16
_SWEEP_SECONDS = 0.1
_PAUSE_SECONDS = 1.0  # a sweep that is later than this one follows a pause
_QUIET_SECONDS = 0.25  # after the last call: another may be on its way
_MAX_LARGE_SENDERS = 256
_SPARE_CALLS = 128  # of a connection, beyond those that may generate: one gateway can fill the server and be refused
_STALL_SECONDS = 2.0  # a client that has not read for so long does not delay the end of the server

_creator: "ContextVar[weakref.ref[asyncio.Task[Any]] | None]" = ContextVar("creator", default=None)


class OpenCall:
    """A call as its handler sees it; made in the handler's task."""

    def __init__(self, context: Context, calls: "OpenCalls") -> None:
        task, creator = asyncio.current_task(), _creator.get()
        assert task is not None
        self.context = context
        self.connection = context.peer()
        self.client = client_address(context)
        self.task = task
        self._creator = creator() if creator else None
        self._calls = calls

    async def receive(self, max_bytes: int | None = None) -> bytes:
        """The message of a call that has only one."""
        if (data := await self.next_message(max_bytes)) is None:
            raise InvalidRequest("", "the call has no message")
        self._calls.served.add(self)
        return data

    async def next_message(self, max_bytes: int | None = None) -> bytes | None:
        """None at the end; InvalidRequest if it has more than `max_bytes`."""
        with self._calls.arriving(self):
            data = await self.context.read()
            if not isinstance(data, bytes):  # grpc.aio.EOF
                return None
            self._calls.note_size(self.connection, len(data))
            data = await decompressed(data, self._calls.max_message_bytes)
        if max_bytes is not None and len(data) > max_bytes:
            raise InvalidRequest("", f"the message has {len(data)} bytes, at most {max_bytes} allowed")
        return data

    async def write(self, message: bytes) -> None:
        """Send a message, which waits until the client reads."""
        reading = self._calls.reading
        reading[self] = time.monotonic()
        try:
            await self.context.write(message)
        finally:
            reading.pop(self, None)

    async def idle(self, event: Awaitable[T]) -> T:
        """Wait for what may never happen; no reason to keep the server from its end."""
        self._calls.served.discard(self)
        with _entered(self._calls.idle, self):
            return await event

    async def refuse(self, error: RequestError) -> None:
        """End a call that does not wait for its client to read."""
        with suppress(grpc.aio.AbortError, grpc.aio.InternalError):  # the latter if the client has cancelled it
            await abort(self.context, error)
        self.task.cancel()

    def cancel(self) -> None:
        """End a call whose status would have to wait until the client reads.

        gRPC has no function for that, but drops calls that nobody holds: neither the task of the handler, nor the
        one that has created it, and waits for the client to cancel.
        """
        if self._creator is not None:
            self._creator.cancel()
        self.task.cancel()


class OpenCalls:
    """All calls of the gRPC port."""

    def __init__(self, config: Config) -> None:
        self._message_seconds = config.client_timeout_seconds
        self._write_seconds = config.client_timeout_seconds
        self.max_message_bytes = config.grpc_max_message_bytes
        self.max_of_connection = config.max_concurrent_requests + _SPARE_CALLS
        self._max_receiving = max(MAX_RECEIVING_BYTES // self.max_message_bytes, 1)
        # since when they have waited, the oldest first
        self.receiving: dict[OpenCall, float] = {}
        self.reading: dict[OpenCall, float] = {}
        self.idle: dict[OpenCall, float] = {}
        self.served: set[OpenCall] = set()  # the end of the server waits for them
        self._num_receiving: Counter[str] = Counter()  # by connection
        self.slow_senders: set[str] = set()  # connections of which several messages are on their way
        self.large_senders: dict[str, None] = {}  # connections whose last message was large, the latest at the end
        self.on_arrived: Callable[[], None] = lambda: None  # called when a message has
        self._last_end = 0.0
        self._refusals: set[asyncio.Task[None]] = set()

    @contextmanager
    def arriving(self, call: OpenCall) -> Iterator[None]:
        """While a message of this call is on its way."""
        self._count_receiving(call.connection, 1)
        try:
            with _entered(self.receiving, call):
                yield
        finally:
            self._count_receiving(call.connection, -1)
            self.on_arrived()

    def _count_receiving(self, connection: str, change: int) -> None:
        """Messages that are there when their calls are do not meet others of their connection here."""
        self._num_receiving[connection] += change
        if self._num_receiving[connection] >= SLOW_MESSAGES:
            self.slow_senders.add(connection)
        else:
            self.slow_senders.discard(connection)
        if not self._num_receiving[connection]:
            del self._num_receiving[connection]

    def arriving_from(self) -> list[str]:
        """The connections of messages on their way, at most MAX_ARRIVING; those that arrive slowly do not count."""
        since = time.monotonic() - ARRIVING_SECONDS
        newest = islice(reversed(self.receiving.items()), MAX_ARRIVING)
        return [call.connection for call, started in newest if started > since]

    def note_size(self, connection: str, num_bytes: int) -> None:
        """Of the last message of a connection."""
        self.large_senders.pop(connection, None)
        if num_bytes >= LARGE_BYTES:
            self.large_senders[connection] = None
            if len(self.large_senders) > _MAX_LARGE_SENDERS:
                del self.large_senders[next(iter(self.large_senders))]

    @contextmanager
    def open(self, context: Context) -> Iterator[OpenCall]:
        """What a handler does before its client only has to read the rest."""
        call = OpenCall(context, self)
        call.task.add_done_callback(lambda _task: self._ended(call))
        try:
            yield call
        finally:
            self.reading[call] = time.monotonic()

    def _ended(self, call: OpenCall) -> None:
        self.reading.pop(call, None)
        if call in self.served:
            self.served.remove(call)
            self._last_end = time.monotonic()

    async def wait_until_idle(self) -> None:
        """Return when all calls have ended but those that wait for their clients."""
        while self._is_active(time.monotonic()):
            await asyncio.sleep(0.02)

    def _is_active(self, now: float) -> bool:
        stalled = self.served.intersection(_waiting_since(self.reading, now - _STALL_SECONDS))
        return len(self.served) > len(stalled) or now - self._last_end < _QUIET_SECONDS

    async def sweep_forever(self) -> None:
        """End calls that wait for too long, and those that are too many."""
        while True:
            due = time.monotonic() + _SWEEP_SECONDS
            await asyncio.sleep(_SWEEP_SECONDS)
            if time.monotonic() - due > _PAUSE_SECONDS:
                self._restart_waits(time.monotonic())
            try:
                await self._sweep(time.monotonic())
            except Exception:  # the next one may succeed
                log.exception("calls that wait for their clients could not be ended")

    def _restart_waits(self, now: float) -> None:
        """After a pause of this process, in which no client could go on."""
        for waiting in (self.receiving, self.reading, self.idle):
            waiting.update(dict.fromkeys(waiting, now))

    async def _sweep(self, now: float) -> None:
        late = ClientTimeout(f"the message has not arrived within {self._message_seconds:g} s")
        await self._end(self.receiving, _waiting_since(self.receiving, now - self._message_seconds), late)
        crowd = _too_many(_waiting_since(self.receiving, now - SLOW_SECONDS), self._max_receiving)
        await self._end(self.receiving, crowd, Overloaded("too many messages arrive slowly"))
        crowd = _too_many(list(self.idle), MAX_SLOW_CALLS)
        await self._end(self.idle, crowd, Overloaded(f"more than {MAX_SLOW_CALLS} calls watch health"))
        late = ClientTimeout(f"the client has not read for {self._write_seconds:g} s")
        await self._end(self.reading, _waiting_since(self.reading, now - self._write_seconds), late)
        crowd = _too_many(_waiting_since(self.reading, now - SLOW_SECONDS), MAX_SLOW_CALLS)
        await self._end(self.reading, crowd, Overloaded(f"more than {MAX_SLOW_CALLS} calls are not read"))

    async def _end(self, waiting: dict[OpenCall, float], calls: list[OpenCall], error: RequestError) -> None:
        """An iteration of the event loop ends a few; those that have gone on meanwhile are not ended."""
        num_ended = 0
        for call in calls:
            if waiting.pop(call, None) is not None:
                num_ended += 1
                self.served.discard(call)
                if waiting is self.reading:
                    call.cancel()
                else:
                    self._refuse(call, error)
                if num_ended % CALLS_PER_SLICE == 0:
                    await asyncio.sleep(0)
        if num_ended:
            log.info("ended %d calls: %s", num_ended, error.detail)

    def _refuse(self, call: OpenCall, error: RequestError) -> None:
        task = asyncio.create_task(call.refuse(error))
        self._refusals.add(task)
        task.add_done_callback(self._refusals.discard)


def remember_creators(loop: asyncio.AbstractEventLoop) -> None:
    """Every task of the loop will know which one has created it: `OpenCall.cancel` needs that."""

    def create(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
        creator = asyncio.current_task(loop)
        _creator.set(None if creator is None else weakref.ref(creator))
        return asyncio.Task(coroutine, loop=loop, **options)

    loop.set_task_factory(create)  # type: ignore[arg-type]


@contextmanager
def _entered(waiting: dict[OpenCall, float], call: OpenCall) -> Iterator[None]:
    waiting[call] = time.monotonic()
    try:
        yield
    finally:
        waiting.pop(call, None)


def _waiting_since(waiting: dict[OpenCall, float], time_: float) -> list[OpenCall]:
    return [call for call, since in takewhile(lambda item: item[1] <= time_, waiting.items())]


def _too_many(calls: list[OpenCall], limit: int) -> list[OpenCall]:
    """Of calls in the order of age, as many as there are too many: the oldest of the client with most, and so on."""
    counts: Counter[str] = Counter()
    rank = {}  # of each call among those of its client, the newest first
    for call in reversed(calls):
        counts[call.client] += 1
        rank[call] = counts[call.client]
    return sorted(calls, key=rank.__getitem__, reverse=True)[: max(len(calls) - limit, 0)]
