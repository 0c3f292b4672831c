"""Pools whose threads all run from the beginning, and what uses them when no other thread can be started."""

import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from grammar_walks import byte_table

from tgis.engine_core.core import EngineCore
from tgis.engine_core.lookups import LookupTable
from tgis.ipc.lookups import GrammarKind, GrammarSpec, LookedUp, LookUp
from tgis.structured_output.compiler import compilers
from tgis.utils.thread_pool import started_pool


def fail(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(threading.Thread, "start", fail)


def test_all_threads_run_at_once(no_more_threads: Callable[[], None]) -> None:
    initialized: list[int] = []
    with started_pool(3, "test", lambda: initialized.append(threading.get_ident())) as pool:
        no_more_threads()
        together = threading.Barrier(3)
        for each in [pool.submit(together.wait, 10) for _ in range(3)]:
            each.result()
    assert len(set(initialized)) == 3


def test_a_thread_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start, count = threading.Thread.start, 0

    def start_one(thread: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count > 1:
            fail(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started_pool(3, "test")


def test_grammars_are_compiled_and_followed_without_another_thread(no_more_threads: Callable[[], None]) -> None:
    answers = queue.SimpleQueue[LookedUp]()
    lookups = LookupTable(answers.put)
    lookups.finders[GrammarSpec] = compilers(byte_table())
    masks = EngineCore(*cast("Any", (None, None, None, lookups))).masks
    no_more_threads()
    lookups.look_up(LookUp(1, GrammarSpec(GrammarKind.GRAMMAR, "start: /ab+/")))
    assert answers.get(timeout=10).reason == ""
    matcher, tokens = lookups.found(1).copy(), [ord("a") + 1]
    masks.prepare([(matcher, tokens)])
    assert matcher.allowed_ids(tokens) == [ord("b") + 1]
    lookups.close()
    masks.close()
