"""Compiles grammars for the front end, in threads of its own so that no step waits for one, and keeps the latest.

llguidance bounds the work by counting it, so that neither a compilation nor a mask takes long, whatever the grammar.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import llguidance

from tgis.errors import GrammarError
from tgis.ipc.lookups import GrammarKind, GrammarSpec, LookedUp, LookUp
from tgis.structured_output.lark import problem_of, to_lark
from tgis.structured_output.matcher import GrammarMatcher, TokenTable
from tgis.utils.thread_pool import started_pool

if TYPE_CHECKING:
    from concurrent.futures import Future

log = logging.getLogger(__name__)

_THREADS = 2  # one expensive grammar does not delay all others
_NICENESS = 5  # more than the process has: where cores are few, steps get three times as much of them
_INITIAL_LEXER_FUEL = 1_000_000  # about 20 ms
_STEP_LEXER_FUEL = 100_000  # of one mask, about 7 ms
_STEP_MAX_ITEMS = 20_000  # likewise; 10,000 are too few for some outputs of objects with 300 optional properties
_MAX_GRAMMAR_SIZE = 200_000  # symbols
_MAX_STATES = 20_000  # of one compiled grammar, about 2 KiB each
_CACHE_SIZE = 64  # compiled grammars


def compile_grammar(spec: GrammarSpec, table: TokenTable) -> GrammarMatcher:
    """GrammarError if it cannot be used."""
    bounds = llguidance.LLParserLimits(
        initial_lexer_fuel=_INITIAL_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_MAX_ITEMS,
        max_lexer_states=_MAX_STATES,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        verbose_errors=False,  # they would quote the grammar
    )
    lark, kind = to_lark(spec)
    matcher = llguidance.LLMatcher(table.tokenizer, lark, log_level=0, limits=bounds)
    if matcher.is_error():
        raise GrammarError(problem_of(matcher.get_error(), kind))
    compiled = GrammarMatcher(matcher, table, in_thread=spec.kind is GrammarKind.GRAMMAR)
    compiled.mask([])  # is there a first token?
    return compiled


class GrammarCompiler:
    """All lookups that are not released, and the cache."""

    def __init__(self, table: TokenTable, send: Callable[[LookedUp], None]) -> None:
        self._table = table
        self._send = send
        self._pool = started_pool(_THREADS, "grammars", lower_priority)
        self._lock = threading.Lock()
        self._cache: dict[GrammarSpec, Future[GrammarMatcher]] = {}  # the least recently used first
        self._held: dict[int, Future[GrammarMatcher]] = {}  # by lookup id

    def look_up(self, lookup: LookUp) -> None:
        """Start a lookup; another thread sends the answer, or this one if it is known."""
        spec = lookup.target
        assert isinstance(spec, GrammarSpec)
        with self._lock:
            future = self._cache.pop(spec, None)
            if future is None:
                future = self._pool.submit(compile_grammar, spec, self._table)
            self._cache[spec] = self._held[lookup.lookup_id] = future
            while len(self._cache) > _CACHE_SIZE:
                del self._cache[next(iter(self._cache))]
        future.add_done_callback(lambda done: self._answer(lookup.lookup_id, done))

    def matcher(self, lookup_id: int) -> GrammarMatcher:
        """A matcher of what a lookup has compiled, for one more output."""
        return self._held[lookup_id].result(timeout=0).copy()

    def release(self, lookup_ids: Iterable[int]) -> None:
        """Drop these lookups, and what nobody waits for any more; unknown ids are ignored."""
        with self._lock:
            released = [future for id_ in lookup_ids if (future := self._held.pop(id_, None))]
            for future in released:
                if future not in self._held.values() and future.cancel():
                    self._cache = {spec: other for spec, other in self._cache.items() if other is not future}

    def close(self) -> None:
        """Drop what no thread has begun to compile; the process ends when the rest is done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, lookup_id: int, done: "Future[GrammarMatcher]") -> None:
        if done.cancelled():
            return
        match done.exception():
            case None:
                problem = ""
            case GrammarError() as error:
                problem = str(error)
            case error:
                log.error("failed to compile a grammar", exc_info=error)
                problem = f"internal error: {type(error).__name__}"
        self._send(LookedUp(lookup_id, problem))


def lower_priority() -> None:
    """Lower the priority of this thread alone: Linux has one for each."""
    with suppress(OSError):  # some containers forbid it
        os.nice(_NICENESS)
