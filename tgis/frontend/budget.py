"""The price list: what calls hold in the memory of this process, bounded for one client and for all.

In bytes, as measured; what else a call needs is in proportion. Nobody waits: a call that finds no room is refused.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tgis.errors import InvalidRequest, Overloaded
from tgis.ipc.request import LogprobOptions

MESSAGE_BYTE = 2  # received, and in a string
JSON_VALUE = 64  # what stands between two commas or brackets of a body over HTTP
INPUT = 2048  # its message, request, queue and output, without the text
DETAIL = 32  # an input token or a candidate for it: as the engine sends it, and in the reply
TOKENS_PER_BYTE = 16  # ids and strings for a byte of a text in Tokenize; the last in the reply, too
OFFSETS_PER_BYTE = 24  # likewise


def details_price(num_tokens: int, options: LogprobOptions) -> int:
    """Of what a call asks about its input tokens."""
    return DETAIL * num_tokens * options.details_per_token if options.input_tokens else 0


class MemoryBudget:
    """What all calls may hold, and those of one client."""

    def __init__(self, total: int, per_client: int) -> None:
        self.held = 0
        self._held_by: Counter[bytes] = Counter()
        self._total, self._per_client = total, min(per_client, total)

    @contextmanager
    def account(self, client: bytes) -> Iterator["Account"]:
        """Of one call; what it holds is given back at the end of the block. No client: nobody knows which."""
        account = Account(self, client)
        try:
            yield account
        finally:
            self._add(client, -account.held)

    def charge(self, client: bytes, held: int, price: int) -> None:
        """Of a call that holds so much already. InvalidRequest if it can never have more, else Overloaded."""
        if held + price > self._per_client:
            text = f"the call takes {held + price} bytes of memory, at most {self._per_client} allowed"
            raise InvalidRequest("", text)
        if client and (by_client := self._held_by[client]) + price > self._per_client:
            raise Overloaded(f"calls of this client hold {by_client} bytes, at most {self._per_client} allowed")
        if self.held + price > self._total:
            raise Overloaded(f"calls hold {self.held} bytes, at most {self._total} allowed")
        self._add(client, price)

    def _add(self, client: bytes, amount: int) -> None:
        self.held += amount
        self._held_by[client] += amount
        if not self._held_by[client]:
            del self._held_by[client]


class Account:
    """What one call holds."""

    def __init__(self, budget: MemoryBudget, client: bytes) -> None:
        self._budget, self.client = budget, client
        self.held = 0

    def charge(self, price: int) -> None:
        """Count it as held; RequestError if there is no room."""
        self._budget.charge(self.client, self.held, price)
        self.held += price
