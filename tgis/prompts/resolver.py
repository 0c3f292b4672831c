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

from tgis.errors import PromptError
from tgis.ipc.adapters import LookupPrompt, Prefix, PromptInfo, PromptProblem

log = logging.getLogger(__name__)

_THREADS = 4  # more than one, so that a slow disk or a large file holds up few


class Prompt(Protocol):
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
class Found:
    """A prompt, and whether files were read for it."""

    prompt: Prompt
    loaded: bool


class Store(Protocol):
    """Where prompts come from."""

    def find(self, prompt_id: str) -> Found:
        """The prompt of an id, for any thread; PromptError if it is not to be had."""


class Lookups:
    """All open lookups; for one id at most one thread is at work."""

    def __init__(self, store: Store, send: Callable[[PromptInfo], None]) -> None:
        self._store = store
        self._send = send
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prompts")
        self._lock = threading.Lock()
        self._kept: dict[int, Prompt | None] = {}  # by lookup; None until it is found
        self._waiting: dict[str, list[int]] = {}  # ids at work -> lookups that came too late for that look

    def ask(self, lookup: LookupPrompt) -> None:
        """Answer it, soon and from another thread."""
        with self._lock:
            self._kept[lookup.number] = None
            if (waiting := self._waiting.get(lookup.id)) is not None:
                waiting.append(lookup.number)
                return
            self._waiting[lookup.id] = []
        self._find(lookup.id, [lookup.number])

    def prompt(self, prefix: Prefix) -> Prompt:
        """What the lookup of `prefix` has found."""
        prompt = self._kept[prefix.lookup]
        assert prompt is not None
        assert prompt.length == prefix.length
        return prompt

    def cancel(self, numbers: Iterable[int]) -> None:
        """Keep nothing for these lookups any more; other numbers are ignored."""
        with self._lock:
            for number in numbers:
                self._kept.pop(number, None)

    def _find(self, prompt_id: str, numbers: list[int]) -> None:
        future = self._pool.submit(self._store.find, prompt_id)
        future.add_done_callback(lambda done: self._answer(prompt_id, numbers, done))

    def _answer(self, prompt_id: str, numbers: list[int], done: "Future[Found]") -> None:
        answers = [_answer_of(number, done) for number in numbers]
        with self._lock:
            for number in self._kept.keys() & set(numbers):
                self._kept[number] = None if done.exception() else done.result().prompt
            late = self._waiting.pop(prompt_id)
            if late:
                self._waiting[prompt_id] = []
        for answer in answers:
            self._send(answer)
        if late:  # they want the files as they were when they came: one more look, which loads nothing if all is well
            self._find(prompt_id, late)


def _answer_of(number: int, done: "Future[Found]") -> PromptInfo:
    match done.exception():
        case None:
            found = done.result()
            prompt = found.prompt
            return PromptInfo(number, prompt.length, prompt.decoder_length, prompt.version, found.loaded)
        case PromptError() as error:
            return PromptInfo(number, problem=PromptProblem(error.problem), reason=str(error))
        case error:
            log.error("a soft prompt or adapter could not be loaded", exc_info=error)
            return PromptInfo(number, problem=PromptProblem.BROKEN, reason=f"internal error: {type(error).__name__}")
