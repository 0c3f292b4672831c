"""TGI's client packages against a real server process, and requests of every kind that its OpenAPI document describes.

`make test-clients` makes the environment of those whose pins clash with ours.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import LAST_MESSAGE, write_template
from harness import Server, running_server
from repository import REPOSITORY

from demo.fake_model import make_fake_model

BIN = REPOSITORY / ".cache" / "clients" / "bin"
FUZZ_SECONDS, FUZZ_SEED = int(os.environ.get("FUZZ_SECONDS", "300")), int(os.environ.get("FUZZ_SEED", "1"))

slow = (pytest.mark.slow, pytest.mark.skipif(not BIN.is_dir(), reason="make test-clients makes the environment"))


@contextlib.contextmanager
def serving(directory: Path, options: dict[str, int], **steps: Any) -> Iterator[Server]:
    """A chat model that repeats its prompt."""
    model = make_fake_model(directory / "model", **steps)
    write_template(model, LAST_MESSAGE)
    with running_server(directory, model, DEPLOYMENT_FRAMEWORK="fake", **options) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"MAX_CONCURRENT_REQUESTS": 2, "MAX_NEW_TOKENS": 1600}
    with serving(tmp_path_factory.mktemp("clients"), options, step_seconds=0.005, poison_token=0) as running:
        yield running


@pytest.mark.parametrize(
    ("python", "name"),
    [
        (Path(sys.executable), "huggingface_hub"),
        pytest.param(BIN / "python", "huggingface_hub", marks=slow),
        pytest.param(BIN / "python", "text_generation", marks=slow),
    ],
)
def test_client(server: Server, python: Path, name: str) -> None:
    script = Path(__file__).parent / f"check_{name}.py"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    environment = os.environ | {"SERVER_URL": f"http://localhost:{server.http_port}"}
    subprocess.run([*command, str(script)], check=True, env=environment)


@slow[0]
@slow[1]
@pytest.mark.timeout(FUZZ_SECONDS + 600)
def test_all_answers_are_as_described(tmp_path: Path) -> None:
    """To requests of every kind: as the document says, and not."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--checks", checks, "--phases", "examples,coverage,fuzzing", "--max-examples", "50"]
    options += ["--suppress-health-check", "all"]
    until = time.monotonic() + FUZZ_SECONDS
    with serving(tmp_path, {"MAX_NEW_TOKENS": 100}) as running:
        url = f"http://localhost:{running.http_port}/openapi.json"
        seeds = itertools.count(FUZZ_SEED)
        while time.monotonic() < until:
            command = [str(BIN / "st"), "run", url, *options, "--seed", str(next(seeds))]
            subprocess.run(command, check=True, cwd=tmp_path)
