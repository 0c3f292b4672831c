"""Golden cases: real servers answer what an oracle built on transformers answered.

A case is an entry in golden/cases/*.yaml, its answer one in golden/expected.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import golden_runner
import pytest
from golden_cases import Case, cases, expected_answers, servers
from golden_runner import write_prompts
from harness import Server, running_server
from repository import REPOSITORY

SEED = 20
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MARKS = {name: [pytest.mark.slow] if spec.slow else [] for name, spec in servers().items()}
CASES = [pytest.param(case.server, case, id=case.id, marks=MARKS[case.server]) for case in cases()]


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    """The name of a server in golden/servers.yaml."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    spec, directory = servers()[name], tmp_path_factory.mktemp(name)
    original = request.getfixturevalue(f"{spec.model}_dir")
    model = spec.model_directory(original, directory / "model")
    options = spec.options | {"DTYPE": "float32"}
    if spec.hub_cache:
        model, options[spec.hub_cache] = Path(f"tgis/{name}"), _hub_cache(directory / "hub", f"tgis/{name}", model)
    if spec.prompts:
        write_prompts(spec.prompts, original, directory / "prompts")
        options["PREFIX_STORE_PATH"] = directory / "prompts"
    with running_server(directory, model, **options) as running:
        yield running
        assert running.get("/metrics")[0] == 200
        assert running.stop() == 0


@pytest.fixture(scope="module")
def problems(name: str, server: Server) -> dict[str, list[str]]:
    """The problems of all cases of one server, by case id."""
    found = asyncio.run(golden_runner.run(server.target, [case for case in cases() if case.server == name], SEED))
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


@pytest.mark.parametrize(("name", "case"), CASES, indirect=["name"], scope="module")
def test_case(problems: dict[str, list[str]], case: Case) -> None:
    if lines := problems[case.id]:
        pytest.fail("\n".join(lines), pytrace=False)


def test_every_expected_answer_has_a_case() -> None:
    for file in {case.file for case in cases()}:
        names = [case.name for case in cases() if case.file == file and case.needs_oracle]
        assert list(expected_answers(file)) == names, f"{file}: see CONTRIBUTING.md"


def test_the_cases_that_the_documentation_names_exist() -> None:
    """As `file: case` of a golden case, or as the node id of another test."""
    text = (REPOSITORY / "tests" / "golden" / "README.md").read_text()
    table = text.split("| Behaviour | Cases |")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+: [^`]+)`", table))
    assert len(named) > 50
    assert named <= {case.id for case in cases()}
    for file, _, test in (name.partition("::") for name in re.findall(r"`(tests/[^`]+)`", table)):
        assert f"def {test}" in (REPOSITORY / file).read_text(), test
