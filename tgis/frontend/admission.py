"""What the server takes on: open calls, inputs in flight, bytes of messages. More is refused at once, nobody waits."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from tgis.errors import SHUTTING_DOWN, Overloaded, Unavailable

_LAST_WORD_SECONDS = 1.0  # lets clients read that the server is shutting down


class Quota:
    """A resource that calls hold while they are open, limited in total and for each client."""

    def __init__(self, what: str, limit: int, per_client: int) -> None:
        self.limit, self.per_client = limit, min(per_client, limit)
        self._what = what
        self._held: Counter[bytes] = Counter()  # inputs held by each client
        self.total = 0

    def most(self, client: bytes) -> int:
        """The most that a client can hold at any time."""
        return self.per_client if client else self.limit

    @contextmanager
    def hold(self, client: bytes, amount: int) -> Iterator[None]:
        """Hold `amount` during the block; Overloaded if that exceeds a limit.

        Unknown clients, for whom `client` is empty, have no limit for each.
        """
        if client and self._held[client] + amount > self.per_client:
            raise Overloaded(f"{self._held[client]} {self._what} of this client, at most {self.per_client} allowed")
        if self.total + amount > self.limit:
            raise Overloaded(f"{self.total} {self._what}, at most {self.limit} allowed")
        self._held[client] += amount
        self.total += amount
        try:
            yield
        finally:
            self.total -= amount
            self._held[client] -= amount
            if not self._held[client]:
                del self._held[client]


class Admission:
    """The limits of one server, for all of its APIs, and the calls that a drain waits for."""

    def __init__(self, calls: Quota, inputs: Quota, message_bytes: Quota, *, by_address: bool = False) -> None:
        """`by_address`: clients without credentials are known by their address."""
        self.calls, self.inputs, self.message_bytes = calls, inputs, message_bytes
        self.draining = False
        self._by_address = by_address
        self._running: set[asyncio.Timeout] = set()

    def client(self, identity: bytes, address: str) -> bytes:
        """The key of a client in every quota: its proven identity, or else its address, or empty."""
        return identity or (address.encode() if self._by_address else b"")

    @asynccontextmanager
    async def running(self, client: bytes, num_bytes: int) -> AsyncIterator[None]:
        """Run a call whose message of `num_bytes` has arrived.

        Overloaded if messages take too much memory; Unavailable once a drain has begun, or when it ends the call.
        """
        if self.draining:
            raise Unavailable(SHUTTING_DOWN)
        with self.message_bytes.hold(client, num_bytes):
            try:
                async with asyncio.timeout(None) as until:
                    self._running.add(until)
                    try:
                        yield
                    finally:
                        self._running.discard(until)
            except TimeoutError:
                if not until.expired():
                    raise
                raise Unavailable(SHUTTING_DOWN) from None

    async def wait_until_idle(self) -> None:
        """Return when no call runs."""
        while self._running:
            await asyncio.sleep(0.02)

    async def end_calls(self) -> None:
        """End all running calls with Unavailable, and give their clients a moment to read it."""
        for until in self._running:
            until.reschedule(0)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_SECONDS):
                await self.wait_until_idle()
