"""The front end's lookups in the store, answered in threads of their own, so that no step waits for a disk.

What a lookup has found is kept until the lookup is cancelled: its prompt stays loaded while the call is validated,
and is exactly the one whose length was told, whatever becomes of the cache and of the files.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from tgis.errors import AdapterError
from tgis.ipc.adapters import AdapterProblem, AdapterRef, AdapterResolved, ResolveAdapter

log = logging.getLogger(__name__)

_THREADS = 4  # more than one, so that a slow disk or a large file holds up few


class Adapter(Protocol):
    """What an engine can use for a row."""

    @property
    def length(self) -> int:
        """Virtual tokens."""

    @property
    def decoder_length(self) -> int:
        """How many of them stand before the output of an encoder-decoder."""

    @property
    def version(self) -> int:
        """A number of its own."""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """A prompt, and whether files were read for it."""

    adapter: Adapter
    loaded: bool


class Store(Protocol):
    """Where prompts come from."""

    def find(self, adapter_id: str) -> StoreResult:
        """The prompt of an id, for any thread; PromptError if it is not to be had."""


class AdapterResolver:
    """All open lookups; for one id at most one thread is at work."""

    def __init__(self, store: Store, send: Callable[[AdapterResolved], None]) -> None:
        self._store = store
        self._send = send
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")
        self._lock = threading.Lock()
        self._resolved: dict[int, Adapter | None] = {}  # by lookup; None until it is found
        self._pending: dict[str, list[int]] = {}  # ids at work -> lookups that came too late for that look

    def resolve(self, lookup: ResolveAdapter) -> None:
        """Answer it, soon and from another thread."""
        with self._lock:
            self._resolved[lookup.lookup_id] = None
            if (waiting := self._pending.get(lookup.adapter_id)) is not None:
                waiting.append(lookup.lookup_id)
                return
            self._pending[lookup.adapter_id] = []
        self._start(lookup.adapter_id, [lookup.lookup_id])

    def adapter(self, prefix: AdapterRef) -> Adapter:
        """What the lookup of `prefix` has found."""
        prompt = self._resolved[prefix.lookup_id]
        assert prompt is not None
        assert prompt.length == prefix.length
        return prompt

    def release(self, numbers: Iterable[int]) -> None:
        """Keep nothing for these lookups any more; other numbers are ignored."""
        with self._lock:
            for number in numbers:
                self._resolved.pop(number, None)

    def _start(self, adapter_id: str, numbers: list[int]) -> None:
        future = self._pool.submit(self._store.find, adapter_id)
        future.add_done_callback(lambda done: self._finish(adapter_id, numbers, done))

    def _finish(self, adapter_id: str, numbers: list[int], done: "Future[StoreResult]") -> None:
        answers = [_message_of(number, done) for number in numbers]
        with self._lock:
            for number in self._resolved.keys() & set(numbers):
                self._resolved[number] = None if done.exception() else done.result().adapter
            late = self._pending.pop(adapter_id)
            if late:
                self._pending[adapter_id] = []
        for answer in answers:
            self._send(answer)
        if late:  # they want the files as they were when they came: one more look, which loads nothing if all is well
            self._start(adapter_id, late)


def _message_of(number: int, done: "Future[StoreResult]") -> AdapterResolved:
    match done.exception():
        case None:
            found = done.result()
            prompt = found.adapter
            return AdapterResolved(number, prompt.length, prompt.decoder_length, prompt.version, found.loaded)
        case AdapterError() as error:
            return AdapterResolved(number, problem=AdapterProblem(error.problem), reason=str(error))
        case error:
            log.error("a soft prompt or adapter could not be loaded", exc_info=error)
            return AdapterResolved(
                number, problem=AdapterProblem.BROKEN, reason=f"internal error: {type(error).__name__}"
            )
