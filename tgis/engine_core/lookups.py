"""What calls name, looked up in threads so that no step waits for a disk or a compilation: adapters and grammars.

What a lookup has found is held until it is released: an adapter stays loaded while the call is validated, and is
exactly the one whose length was reported, whatever happens to the cache and the files.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any

from tgis.errors import AdapterError, GrammarError
from tgis.ipc.lookups import Acquire, Acquired, AdapterProblem, AdapterRef, GrammarSpec

log = logging.getLogger(__name__)

_KEPT = 64  # compiled grammars that nobody may hold

Finder = tuple[Executor, Callable[[Any], Any]]  # threads, and what finds a target in them


class LookupTable:
    """All lookups that are not released; at most one thread works on a target."""

    def __init__(self, send: Callable[[Acquired], None]) -> None:
        self.finders: dict[type[str | GrammarSpec], Finder] = {}  # finders of adapters (by id) and of grammars
        self._send = send
        self._lock = threading.Lock()
        self._held: dict[int, Future[Any]] = {}  # results by lookup id
        # Adapters while they are loaded, since their files may change, and the latest grammars; the latest last.
        self._known: dict[str | GrammarSpec, Future[Any]] = {}

    def acquire(self, lookup: Acquire) -> None:
        """Start a lookup, or join one of the same target; another thread sends the answer, or this one if it knows."""
        target = lookup.target
        with self._lock:
            known = self._known.pop(target, None)
            is_first = known is None or known.cancelled()
            if known is None or is_first:
                threads, find = self.finders[type(target)]  # the front end refuses what this engine cannot have
                known = threads.submit(find, target)
            self._known[target] = self._held[lookup.lookup_id] = known
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        if is_first and isinstance(target, str):
            known.add_done_callback(lambda _: self._known.pop(target, None))
        known.add_done_callback(lambda done: done.cancelled() or self._send(_answer(lookup, done, is_first=is_first)))

    def found(self, lookup_id: int) -> Any:
        """What a lookup has found."""
        return self._held[lookup_id].result(timeout=0)

    def release(self, lookup_ids: Iterable[int]) -> None:
        """Drop these lookups, and what nobody waits for any more; unknown ids are ignored."""
        with self._lock:
            released = [future for id_ in lookup_ids if (future := self._held.pop(id_, None))]
            for future in released:
                if future not in self._held.values():
                    future.cancel()

    def close(self) -> None:
        """Drop what no thread has begun with; the process ends when the rest is done."""
        self.release([*self._held])


def _answer(lookup: Acquire, done: Future[Any], *, is_first: bool) -> Acquired:
    lookup_id, target = lookup.lookup_id, lookup.target
    match done.exception():
        case None if isinstance(target, str):
            adapter = done.result().adapter
            lengths = adapter.length, adapter.decoder_length
            ref = AdapterRef(target, *lengths, lookup_id, adapter.version, adapter.rank)
            return Acquired(lookup_id, adapter=ref, loaded=done.result().loaded and is_first)
        case None:
            return Acquired(lookup_id)
        case AdapterError() as error:
            return Acquired(lookup_id, str(error), AdapterProblem(error.problem))
        case GrammarError() as error:
            return Acquired(lookup_id, str(error))
        case error:
            log.error("a lookup failed", exc_info=error)
            return Acquired(lookup_id, f"internal error: {type(error).__name__}", AdapterProblem.BROKEN)
