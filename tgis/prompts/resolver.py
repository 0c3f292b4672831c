"""Resolves adapter ids for the front end, in threads of its own so that no step waits for a disk.

A resolved adapter is held until it is released: it stays loaded while the call is validated, and is exactly the one
whose length was reported, whatever happens to the cache and the files.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterProblem, AdapterRef, LookedUp, LookUp
from tgis.utils.thread_pool import started_pool

if TYPE_CHECKING:
    from concurrent.futures import Future

log = logging.getLogger(__name__)

_THREADS = 4  # several, so that one slow file does not delay all lookups


class Adapter(Protocol):
    """A loaded adapter, as an engine uses it."""

    @property
    def length(self) -> int:
        """Virtual tokens."""

    @property
    def decoder_length(self) -> int:
        """How many of them are prepended to the output of an encoder-decoder."""

    @property
    def version(self) -> int:
        """Unique for each load."""

    @property
    def rank(self) -> int:
        """The highest rank of LoRA in any layer; 0 for a soft prompt."""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """An adapter, and whether its files had to be read."""

    adapter: Adapter
    loaded: bool


class Store(Protocol):
    """Where adapters come from."""

    def find(self, adapter_id: str) -> StoreResult:
        """The adapter of an id; AdapterError if it is missing or unusable. Called from several threads."""


class AdapterResolver:
    """All lookups that are not released; at most one thread works on an id."""

    def __init__(self, store: Store, send: Callable[[LookedUp], None]) -> None:
        self._store = store
        self._send = send
        self._pool = started_pool(_THREADS, "adapters")
        self._lock = threading.Lock()
        self._resolved: dict[int, Adapter | None] = {}  # by lookup id; None until found
        self._pending: dict[str, list[int]] = {}  # ids being loaded -> lookups that arrived meanwhile

    def look_up(self, lookup: LookUp) -> None:
        """Start a lookup; another thread sends the answer."""
        adapter_id = lookup.target
        assert isinstance(adapter_id, str)
        with self._lock:
            self._resolved[lookup.lookup_id] = None
            if (waiting := self._pending.get(adapter_id)) is not None:
                waiting.append(lookup.lookup_id)
                return
            self._pending[adapter_id] = []
        self._start(adapter_id, [lookup.lookup_id])

    def adapter(self, ref: AdapterRef) -> Adapter:
        """The adapter that the lookup of `ref` has found."""
        adapter = self._resolved[ref.lookup_id]
        assert adapter is not None
        assert adapter.length == ref.length
        return adapter

    def release(self, lookup_ids: Iterable[int]) -> None:
        """Drop the adapters of these lookups; unknown ids are ignored."""
        with self._lock:
            for lookup_id in lookup_ids:
                self._resolved.pop(lookup_id, None)

    def _start(self, adapter_id: str, lookup_ids: list[int]) -> None:
        future = self._pool.submit(self._store.find, adapter_id)
        future.add_done_callback(lambda done: self._finish(adapter_id, lookup_ids, done))

    def _finish(self, adapter_id: str, lookup_ids: list[int], done: "Future[StoreResult]") -> None:
        answers = [_answer(lookup_id, adapter_id, done) for lookup_id in lookup_ids]
        with self._lock:
            for lookup_id in self._resolved.keys() & set(lookup_ids):
                self._resolved[lookup_id] = None if done.exception() else done.result().adapter
            late = self._pending.pop(adapter_id)
            if late:
                self._pending[adapter_id] = []
        for answer in answers:
            self._send(answer)
        if late:  # the files may have changed since the load began: look again
            self._start(adapter_id, late)


def _answer(lookup_id: int, adapter_id: str, done: "Future[StoreResult]") -> LookedUp:
    match done.exception():
        case None:
            found = done.result()
            adapter = found.adapter
            lengths = adapter.length, adapter.decoder_length
            ref = AdapterRef(adapter_id, *lengths, lookup_id, adapter.version, adapter.rank)
            return LookedUp(lookup_id, adapter=ref, loaded=found.loaded)
        case AdapterError() as error:
            return LookedUp(lookup_id, str(error), AdapterProblem(error.problem))
        case error:
            log.error("failed to load an adapter", exc_info=error)
            reason = f"internal error: {type(error).__name__}"
            return LookedUp(lookup_id, reason, AdapterProblem.BROKEN)
