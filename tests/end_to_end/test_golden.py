"""Golden cases: real servers answer what an oracle built on transformers answers (golden_oracle.py).

A case is an entry in golden/cases/*.yaml. A new one needs no code, only `python tests/support/golden_oracle.py`.
"""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import golden_runner
import pytest
from golden_cases import Case, cases, expected_answers, servers
from golden_model import write_prompts
from harness import running_server
from repository import REPOSITORY, python_path

SEED = 20
COMMIT = "0123456789abcdef0123456789abcdef01234567"

CASES = [pytest.param(case.server, case, id=case.id) for case in cases()]


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The problems of all cases of one server, by case id."""
    name = request.param
    spec = servers()[name]
    directory = tmp_path_factory.mktemp(name)
    model = spec.model_directory(request.getfixturevalue(f"{spec.model}_dir"), directory / "model")
    options = spec.options | {"DTYPE": "float32"}
    if spec.hub_cache:
        model, options[spec.hub_cache] = Path(f"tgis/{name}"), _hub_cache(directory / "hub", f"tgis/{name}", model)
    if spec.prompts:
        write_prompts(spec.prompts, model, directory / "prompts")
        options["PREFIX_STORE_PATH"] = directory / "prompts"
    with running_server(directory, model, **options) as server:
        found = asyncio.run(golden_runner.run(server.target, [case for case in cases() if case.server == name], SEED))
        status, _ = server.get("/metrics")
        assert status == 200
        assert server.stop() == 0
        if any(found.values()):
            print(server.log.read_text()[-10_000:])
    return found


def _hub_cache(cache: Path, name: str, model: Path) -> Path:
    """A cache as huggingface_hub lays it out, with one model."""
    entry = cache / "--".join(["models", *name.split("/")])
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    (entry / "snapshots").mkdir()
    (entry / "snapshots" / COMMIT).symlink_to(model.absolute())
    return cache


@pytest.mark.parametrize(("problems", "case"), CASES, indirect=["problems"], scope="module")
def test_case(problems: dict[str, list[str]], case: Case) -> None:
    if lines := problems[case.id]:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.slow
def test_the_oracle_still_gives_the_expected_answers() -> None:
    """The expected answers belong to the current cases, models and oracle."""
    command = [sys.executable, "tests/support/golden_oracle.py", "--check"]
    environ = os.environ | {"PYTHONPATH": python_path(REPOSITORY), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, check=False, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


def test_every_expected_answer_has_a_case() -> None:
    for file in {case.file for case in cases()}:
        names = [case.name for case in cases() if case.file == file and case.needs_oracle]
        assert list(expected_answers(file)) == names, f"{file}: run `python tests/support/golden_oracle.py`"


def test_the_cases_that_the_documentation_names_exist() -> None:
    """As `file: case` of a golden case, or as the node id of another test."""
    text = (REPOSITORY / "docs" / "compatibility.md").read_text()
    table = text.split("| Behaviour | Cases |")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+: [^`]+)`", table))
    assert len(named) > 50
    assert named <= {case.id for case in cases()}
    for file, _, test in (name.partition("::") for name in re.findall(r"`(tests/[^`]+)`", table)):
        assert f"def {test}" in (REPOSITORY / file).read_text(), test
