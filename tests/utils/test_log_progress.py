"""Progress of slow work in the log."""

import logging
import threading

import pytest

from tgis.utils import log_progress


def test_progress_is_logged_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_progress, "_INTERVAL_SECONDS", 0.001)
    caplog.set_level(logging.INFO)
    thrice = threading.Event()
    times: list[int] = []

    def tell() -> str:
        times.append(len(times))
        if len(times) == 3:
            thrice.set()
        return f"{len(times)} of many"

    with log_progress.log_progress(tell):
        assert thrice.wait(60)
    assert caplog.messages[:3] == ["  1 of many", "  2 of many", "  3 of many"]
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_an_exception_stops_the_logging() -> None:
    with pytest.raises(ValueError, match="broken"), log_progress.log_progress(lambda: "never said"):
        raise ValueError("broken")
    assert "progress" not in {thread.name for thread in threading.enumerate()}
