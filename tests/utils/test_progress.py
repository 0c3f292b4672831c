"""Progress: a bar on a terminal, lines in the log without one."""

import contextlib
import itertools
import logging
import os
import sys
import termios
import threading

import pytest
from harness import wait_until

from tgis.utils import progress
from tgis.utils.queued_stream import QueuedStream


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_logged_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.001)
    caplog.set_level(logging.INFO)
    sizes = itertools.count(1 << 30, 1 << 29)
    with contextlib.suppress(ValueError), progress.watched("loading", lambda: next(sizes), 2 << 30, "B"):
        wait_until(lambda: len(caplog.messages) >= 4, "progress", 60)
        if fails:
            raise ValueError
    shown = [message.partition(" after ")[0].split() for message in caplog.messages[:4]]
    assert shown == [["loading:", size, "of", "2.00GB"] for size in ("1.00G", "1.50G", "2.00G", "2.00G")]
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, stderr = os.openpty()
    termios.tcsetwinsize(stderr, (24, 80))
    monkeypatch.setattr(sys, "stderr", QueuedStream(stderr))
    monkeypatch.setitem(progress._BAR, "delay", 1e-9)
    written = ""
    with progress.watched("loading", lambda: 3, 4):
        while " 75%|" not in written:
            written += os.read(terminal, 4096).decode()
    os.close(terminal)
