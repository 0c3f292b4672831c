"""What a process gives back is not lost."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import run_async
from safetensors.torch import load_file, save_file

from tgis.engines.memory.available import read_proc_bytes
from tgis.utils import memory
from tgis.utils.memory import return_unused_memory


def test_pages_of_files_that_have_been_read_are_let_go_of(tmp_path: Path) -> None:
    """Not those that somebody has written to."""
    for name in ("read", "written"):
        save_file({"x": torch.ones(8 << 20)}, tmp_path / f"{name}.safetensors")
    read, written = (load_file(tmp_path / f"{name}.safetensors")["x"] for name in ("read", "written"))
    written[0] = 2
    before = resident_files()
    assert read.sum() == written.sum() - 1 == 8 << 20
    assert resident_files() - before > 60 << 20
    return_unused_memory()
    assert resident_files() < before + (34 << 20)
    assert read.sum() == written.sum() - 1 == 8 << 20


@run_async
async def test_the_heap_is_trimmed_regularly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "trim_heap", trim := mock.Mock(side_effect=[None, RuntimeError]))
    with pytest.raises(RuntimeError):
        await memory.trim_regularly(0.0)
    assert trim.mock_calls == [mock.call(collect=False)] * 2


def resident_files() -> int:
    """Files of a tmpfs count as shared memory."""
    return sum(read_proc_bytes(Path("/proc/self/status"), kind) for kind in ("RssFile", "RssShmem"))
