"""Nothing in the working directory is imported, by no command and no child: it may be that of a hostile model."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from harness import running_server, unary_request

from demo.fake_model import make_fake_model


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A model directory with a module for every name that could be imported; each leaves a file when it is."""
    directory = make_fake_model(tmp_path / "model")
    installed = filter(str.isidentifier, packages_distributions())
    for name in {"tgis", "sitecustomize", "usercustomize", *sys.stdlib_module_names, *installed}:
        (directory / f"{name}.py").write_text("import posix\nposix.close(posix.open(__file__ + '.ran', 65, 0o600))\n")
    return directory


@pytest.fixture(autouse=True)
def _nothing_ran(poisoned: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(poisoned)
    yield
    assert list(poisoned.glob("*.ran")) == []


def test_python_alone_would_import_them(poisoned: Path) -> None:
    subprocess.run([sys.executable, "-m", "torch"], check=True)
    mark = poisoned / "torch.py.ran"
    assert mark.exists()
    mark.unlink()


def test_server_and_engine(poisoned: Path, tmp_path: Path) -> None:
    with running_server(tmp_path, poisoned, DEPLOYMENT_FRAMEWORK="fake") as server, server.stub() as stub:
        (response,) = stub.Generate(unary_request("hello", 3), timeout=120).responses
    assert response.generated_token_count == 3


@pytest.mark.slow
def test_conversion(poisoned: Path) -> None:
    import torch

    torch.save({"lm_head.weight": torch.zeros(300, 16)}, poisoned / "pytorch_model.bin")
    command = [sys.executable, "-P", "-m", "tgis", "convert-to-safetensors", str(poisoned)]
    subprocess.run(command, check=True, timeout=300)
    assert (poisoned / "model.safetensors").exists()
