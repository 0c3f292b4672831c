"""Permits: an input has one from its admission until the engine is done with it."""

from collections import Counter

from tgis.errors import Overloaded

MAX_UNREAD_BYTES = 64 << 20


class Permits:
    """Those of all calls."""

    def __init__(self, limit: int, per_client: int) -> None:
        self.limit = limit
        self._per_client = min(per_client, limit)
        self._taken_by: Counter[bytes] = Counter()
        self.num_taken = 0
        self.unread_bytes = 0  # of outputs that are complete and have no permit any more

    def most_of_a_call(self, client: bytes) -> int:
        """How many inputs a call of this client can have at any time. No client: nobody knows which."""
        return self._per_client if client else self.limit

    def take(self, num_inputs: int, client: bytes = b"") -> "Permit":
        """For the inputs of one call; Overloaded if there are not so many left."""
        if self.num_taken + num_inputs > self.limit:
            raise Overloaded(f"{self.num_taken} inputs in flight, at most {self.limit} allowed")
        if client and (taken := self._taken_by[client]) + num_inputs > self._per_client:
            raise Overloaded(f"{taken} inputs of this client in flight, at most {self._per_client} allowed")
        return Permit(self, num_inputs, client)

    def add(self, client: bytes, num_inputs: int) -> None:
        """Count permits as taken, or, if negative, as given back."""
        self.num_taken += num_inputs
        self._taken_by[client] += num_inputs
        if not self._taken_by[client]:
            del self._taken_by[client]


class Permit:
    """Those of one call, until `give_back`."""

    def __init__(self, permits: Permits, num_inputs: int, client: bytes) -> None:
        self._permits = permits
        self._client = client
        self._num_taken = num_inputs
        self._unread_bytes = 0
        permits.add(client, num_inputs)

    def output_complete(self, unread_bytes: int) -> None:
        """Give the permit back although the client has yet to read, unless too much is unread already."""
        if self._permits.unread_bytes + unread_bytes <= MAX_UNREAD_BYTES:
            self._hold(0, unread_bytes)

    def give_back(self) -> None:
        self._hold(0, 0)

    def _hold(self, num_taken: int, unread_bytes: int) -> None:
        self._permits.add(self._client, num_taken - self._num_taken)
        self._permits.unread_bytes += unread_bytes - self._unread_bytes
        self._num_taken, self._unread_bytes = num_taken, unread_bytes
