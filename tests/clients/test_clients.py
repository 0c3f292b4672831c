"""Client packages of TGI's and of OpenAI's API against a server, and requests of every kind that its
OpenAPI document describes.

`make test-clients` makes the environment of those whose pins clash with ours.
"""

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_templates import LAST_MESSAGE
from harness import running_fake
from local_server import LocalServer, local_server
from repository import REPOSITORY

FOLDER = REPOSITORY / ".cache" / "clients"
BIN = FOLDER / "bin"
FUZZ_SECONDS, FUZZ_SEED = int(os.environ.get("FUZZ_SECONDS", "300")), int(os.environ.get("FUZZ_SEED", "1"))

CLIENTS = ["huggingface_hub", "text_generation", "openai", "openai_browser", "openai_agents", "pydantic_ai", "ai_sdk"]
CLIENTS += ["langchain", "litellm", "lm_eval"]
# Of docs/clients.md: each heading, and the language and code of the block below.
_EXAMPLE = re.compile(r"^### (.+)\n(?:(?!#|```|\*Not run).*\n)*```(python|js)\n((?:.*\n)*?)```$", re.MULTILINE)
EXAMPLES = {heading: code for heading, *code in _EXAMPLE.findall((REPOSITORY / "docs/clients.md").read_text())}
slow = (pytest.mark.slow, pytest.mark.skipif(not BIN.is_dir(), reason="make test-clients makes the environment"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    steps = {"step_seconds": 0.005, "poison_token": 0}
    options = {"MAX_BEST_OF": 5, "MAX_NEW_TOKENS": 1600, "SERVED_MODEL_NAME": "any", "CORS_ALLOW_ORIGIN": "*"}
    with local_server(tmp_path_factory.mktemp("clients"), steps, LAST_MESSAGE, **options) as running:
        yield running


@pytest.mark.parametrize(
    ("python", "name"),
    [
        (Path(sys.executable), "huggingface_hub"),
        *(pytest.param(BIN / "python", name, marks=slow) for name in CLIENTS),
    ],
)
def test_client(server: LocalServer, python: Path, name: str) -> None:
    (script,) = Path(__file__).parent.glob(f"check_{name}.*")
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    environment = os.environ | {"SERVER_URL": f"http://localhost:{server.http_port}"}
    command = ["node"] if script.suffix == ".mjs" else command
    subprocess.run([*command, str(script)], check=True, env=environment, cwd=FOLDER if FOLDER.is_dir() else None)


@pytest.mark.parametrize("heading", [pytest.param(heading, marks=slow) for heading in EXAMPLES])
def test_an_example_of_the_docs(server: LocalServer, heading: str) -> None:
    language, code = EXAMPLES[heading]
    for shown, real in (("3000", server.http_port), ("8033", server.grpc_port)):
        code = code.replace(f"localhost:{shown}", f"localhost:{real}")
    code = code.replace("smollm2", "any").replace("proto/generation.proto", str(REPOSITORY / "proto/generation.proto"))
    python = sys.executable if "grpc" in heading.lower() else str(BIN / "python")
    program = ["node", "--input-type=module", "-e"] if language == "js" else [python, "-c"]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run([*program, code], check=True, cwd=FOLDER, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split()[0] in ("Say", "Once")  # the engine repeats its prompt


@slow[0]
@slow[1]
@pytest.mark.timeout(FUZZ_SECONDS + 600)
def test_all_answers_are_as_described(tmp_path: Path) -> None:
    """To requests of every kind: as the document says, and not."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--checks", checks, "--phases", "examples,coverage,fuzzing", "--max-examples", "50"]
    options += ["--suppress-health-check", "all"]
    until = time.monotonic() + FUZZ_SECONDS
    with running_fake(tmp_path, {}, LAST_MESSAGE, MAX_NEW_TOKENS=100) as running:
        url = f"http://localhost:{running.http_port}/openapi.json"
        seeds = itertools.count(FUZZ_SEED)
        while time.monotonic() < until:
            command = [str(BIN / "st"), "run", url, *options, "--seed", str(next(seeds))]
            subprocess.run(command, check=True, cwd=tmp_path)
