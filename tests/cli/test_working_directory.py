"""Nothing in the working directory is imported, by no command and no child: it may be that of a hostile model."""

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from harness import running_server, unary_request

from demo.fake_model import make_fake_model


def test_server_and_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's directory has a module for every name that could be imported; each leaves a file when it is."""
    directory = make_fake_model(tmp_path / "model")
    installed = filter(str.isidentifier, packages_distributions())
    for name in {"tgis", "sitecustomize", "usercustomize", *sys.stdlib_module_names, *installed}:
        (directory / f"{name}.py").write_text("import posix\nposix.close(posix.open(__file__ + '.ran', 65, 0o600))\n")
    monkeypatch.chdir(directory)
    with running_server(tmp_path, directory, DEPLOYMENT_FRAMEWORK="fake") as server, server.stub() as stub:
        (response,) = stub.Generate(unary_request("hello", 3), timeout=120).responses
    assert response.generated_token_count == 3
    assert list(directory.glob("*.ran")) == []
