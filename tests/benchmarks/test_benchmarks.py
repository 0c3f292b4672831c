"""Every benchmark can be imported and shows its help."""

import importlib.util
import pkgutil
import runpy
import sys
from pathlib import Path

import pytest

import benchmarks

UNINSTALLED = {"benchmarks.convert_to_ctranslate2", "benchmarks.llama_cpp"}  # need a package of a peer
MODULES = {module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")} - UNINSTALLED


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_benchmark_starts(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    if "ArgumentParser(" not in Path(str(spec.origin)).read_text():
        importlib.import_module(name)
        return
    monkeypatch.delitem(sys.modules, name, raising=False)  # else runpy warns
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_module(name, run_name="__main__")
    assert "usage: " in capsys.readouterr().out
