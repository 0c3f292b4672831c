"""Permits: an input has one from its admission until the engine is done with it."""

from tgis.errors import Overloaded

MAX_UNREAD_BYTES = 64 << 20


class Permits:
    """Those of all calls."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_taken = 0
        self.unread_bytes = 0  # of outputs that are complete and have no permit any more

    def take(self, num_inputs: int) -> "Permit":
        """For the inputs of one call; Overloaded if there are not so many left."""
        if self.num_taken + num_inputs > self.limit:
            raise Overloaded(f"{self.num_taken} inputs in flight, at most {self.limit} allowed")
        return Permit(self, num_inputs)


class Permit:
    """Those of one call, until `give_back`."""

    def __init__(self, permits: Permits, num_inputs: int) -> None:
        self._permits = permits
        self._num_taken = num_inputs
        self._unread_bytes = 0
        permits.num_taken += num_inputs

    def output_complete(self, unread_bytes: int) -> None:
        """Give the permit back although the client has yet to read, unless too much is unread already."""
        if self._permits.unread_bytes + unread_bytes <= MAX_UNREAD_BYTES:
            self._hold(0, unread_bytes)

    def give_back(self) -> None:
        self._hold(0, 0)

    def _hold(self, num_taken: int, unread_bytes: int) -> None:
        self._permits.num_taken += num_taken - self._num_taken
        self._permits.unread_bytes += unread_bytes - self._unread_bytes
        self._num_taken, self._unread_bytes = num_taken, unread_bytes
