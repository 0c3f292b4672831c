"""Resolves adapter ids for the front end, in threads of its own so that no step waits for a disk.

A resolved adapter is held until it is released: it stays loaded while the call is validated, and is exactly the one
whose length was reported, whatever happens to the cache and the files.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterProblem, AdapterRef, LookedUp, LookUp
from tgis.utils.thread_pool import started_pool

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tgis.prompts.store import LoadedAdapter  # needs torch, which the engine `fake` does without

log = logging.getLogger(__name__)

_THREADS = 4  # several, so that one slow file does not delay all lookups


@dataclass(frozen=True, slots=True)
class StoreResult:
    """An adapter, and whether its files had to be read."""

    adapter: "LoadedAdapter"
    loaded: bool


class AdapterResolver:
    """All lookups that are not released; at most one thread works on an id."""

    def __init__(self, find: Callable[[str], StoreResult], send: Callable[[LookedUp], None]) -> None:
        """`find` is `AdapterStore.find`, which several threads call."""
        self._find_in_store = find
        self._send = send
        self._pool = started_pool(_THREADS, "adapters")
        self._lock = threading.Lock()
        self._held: dict[int, Future[StoreResult]] = {}  # by lookup id
        self._loading: dict[str, Future[StoreResult]] = {}  # by adapter id

    def look_up(self, lookup: LookUp) -> None:
        """Start a lookup, or join the one of the same id; another thread sends the answer."""
        adapter_id = lookup.target
        assert isinstance(adapter_id, str)
        with self._lock:
            is_first = adapter_id not in self._loading
            if is_first:
                self._loading[adapter_id] = self._pool.submit(self._find, adapter_id)
            future = self._held[lookup.lookup_id] = self._loading[adapter_id]
        future.add_done_callback(lambda done: self._send(_answer(lookup.lookup_id, adapter_id, done, is_first)))

    def adapter(self, ref: AdapterRef) -> "LoadedAdapter":
        """The adapter that the lookup of `ref` has found."""
        adapter = self._held[ref.lookup_id].result(timeout=0).adapter
        assert adapter.length == ref.length
        return adapter

    def release(self, lookup_ids: Iterable[int]) -> None:
        """Drop the adapters of these lookups; unknown ids are ignored."""
        with self._lock:
            for lookup_id in lookup_ids:
                self._held.pop(lookup_id, None)

    def _find(self, adapter_id: str) -> StoreResult:
        try:
            return self._find_in_store(adapter_id)
        finally:
            with self._lock:
                del self._loading[adapter_id]


def _answer(lookup_id: int, adapter_id: str, done: "Future[StoreResult]", is_first: bool) -> LookedUp:
    match done.exception():
        case None:
            found = done.result()
            adapter = found.adapter
            lengths = adapter.length, adapter.decoder_length
            ref = AdapterRef(adapter_id, *lengths, lookup_id, adapter.version, adapter.rank)
            return LookedUp(lookup_id, adapter=ref, loaded=found.loaded and is_first)
        case AdapterError() as error:
            return LookedUp(lookup_id, str(error), AdapterProblem(error.problem))
        case error:
            log.error("failed to load an adapter", exc_info=error)
            reason = f"internal error: {type(error).__name__}"
            return LookedUp(lookup_id, reason, AdapterProblem.BROKEN)
