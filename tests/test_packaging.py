"""Packages and the image: what they install, where from, and that it works; pinned versions, make targets."""

import configparser
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

import containerfile
import pytest
from harness import running_fake
from packaging.requirements import Requirement

from tgis.config import Config, parse
from tgis.utils.options import declared_options

ROOT = Path(__file__).parents[1]
NAMES = {name.upper() for row in declared_options(Config) for name in row.names}
RECIPE = (ROOT / "Containerfile").read_text()
IMAGE = containerfile.describe(RECIPE, Path("/"))


def test_the_image_starts_the_server_as_its_first_process() -> None:
    assert IMAGE.command == ["tgis", "serve"]
    assert IMAGE.user == "2000:0"  # runAsNonRoot can only be checked for a numeric id


def test_the_environment_of_the_image_is_a_valid_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(IMAGE.environment) - NAMES == {"HOME", "LANG", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
    monkeypatch.setattr(os, "environ", IMAGE.environment)
    config = parse([], {"MODEL_NAME": "m", **IMAGE.environment}, "tgis serve")
    assert IMAGE.ports == [config.port, config.grpc_port]
    assert config.cache_dir.is_relative_to("/tmp")
    assert config.hf_home.is_relative_to("/tmp")


def test_the_build_context_is_what_the_image_copies() -> None:
    copied = {
        source.rstrip("/")
        for instruction, argument in containerfile.steps(RECIPE)
        if instruction == "COPY" and not argument.startswith("--from=")
        for source in argument.split()[:-1]
    }
    lines = (ROOT / ".containerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert {source.split("/")[0] for source in copied} == allowed


@pytest.mark.parametrize(("extras", "installed"), [("", "."), ("onnx,otel", ".[onnx,otel]")])
def test_the_image_installs_extras(extras: str, installed: str) -> None:
    (argument,) = re.findall(r"^RUN pip install .* \"(\S+EXTRAS\S+)\"", RECIPE, re.MULTILINE)
    shown = subprocess.check_output(["sh", "-c", f'echo "{argument}"'], env={"EXTRAS": extras}, text=True)
    assert shown == f"{installed}\n"
    (default,) = re.findall(r"^ARG EXTRAS=(.*)", RECIPE, re.MULTILINE)
    assert set(default.split(",")) <= setup_cfg()["options.extras_require"].keys()


@pytest.fixture(scope="module")
def built_image() -> Iterator[containerfile.Image]:
    import torch

    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    variant = "cuda" if torch.version.cuda else "cpu"  # what pip finds here
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield containerfile.replay(RECIPE, ROOT, Path(directory), {"VARIANT": variant})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_image_builds_and_works_for_any_user(built_image: containerfile.Image) -> None:
    image, user = built_image, containerfile.unprivileged_uid()
    assert image.run(["tgis", "--help"], user).startswith("usage: tgis")
    for script in ("text-generation-launcher", "text-generation-server", "model-util", "grpc_healthcheck"):
        assert image.run([script, "--help"], user).startswith(f"usage: {script} ")
    module = ["python", "-m", "vllm_tgis_adapter"]
    assert image.run([*module, "--help"], user).startswith(f"usage: {' '.join(module)} ")
    modules = "tgis.server, tgis.engine_core.main, onnxruntime, opentelemetry.exporter.otlp.proto.grpc"
    where = image.run(["python", "-c", f"import {modules}; print(tgis.server.__file__)"], user)
    assert where.startswith(str(image.root / "venv"))
    load = "from tgis.engines.kernels.cpu.library import load_kernels; print(load_kernels('generic', '').isa)"
    assert image.run(["python", "-c", load], user) == "generic\n"  # prebuilt: there is no CACHE_DIR to compile in
    assert image.local("/licenses/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_the_image_generates_with_a_read_only_root_and_no_network(
    built_image: containerfile.Image, smollm2_dir: Path
) -> None:
    script = f"""
    exec 3>&1 >&2
    {shlex.join(IMAGE.command)} --model-name {smollm2_dir} & server=$!
    until tgis health; do kill -0 $server; sleep 1; done
    id -u >&3; id -G >&3
    tgis generate --max-new-tokens 8 "The capital of France is" >&3
    ! touch /x {built_image.root}/x
    kill $server; wait $server
    """
    user, groups, text = built_image.run_confined(script, 12345).split("\n", 2)
    assert (user, groups) == ("12345", "0")
    assert "Paris" in text


def setup_cfg(folder: str = ".") -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / folder / "setup.cfg")
    return parser


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def requirements() -> list[Requirement]:
    parser = setup_cfg()
    texts = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
    return [Requirement(line) for text in texts for line in lines(text)]


def test_constraints_are_exact_and_within_the_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    named = {_normal(name): version for name, version in pins.items()}
    assert len(named) == len(pins)
    for requirement in requirements():
        assert named[_normal(requirement.name)] in requirement.specifier, requirement


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_oldest_dependencies_are_the_lower_bounds() -> None:
    """Those that have one; `make test-oldest` installs what this command of it prints."""
    (command,) = re.findall(r"^\t(sed .*setup\.cfg) > .*/bounds\.txt$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = subprocess.check_output(command, shell=True, cwd=ROOT, text=True)
    installed = [bound for line in shown.splitlines() for bound in lower_bounds(Requirement(line))]
    assert installed == [bound for requirement in requirements() for bound in lower_bounds(requirement)]


def lower_bounds(requirement: Requirement) -> list[tuple[str, str, str]]:
    lowest = [each.version for each in requirement.specifier if each.operator in {">=", "=="}]
    return [(requirement.name, version, str(requirement.marker)) for version in lowest]


def test_the_source_distribution_has_the_kernels_and_no_tests(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    files = (tmp_path / "tgis.egg-info" / "SOURCES.txt").read_text().splitlines()
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tgis").rglob("csrc/*.[ch]")} <= set(files)
    assert [file for file in files if file.startswith("tests")] == []


def test_setuptools_finds_every_package() -> None:
    folders = {path.parent for path in (ROOT / "tgis").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def build(folder: str, target: Path) -> Path:
    """Build the Python part of a distribution."""
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_py", "-d", str(target)]
    subprocess.run(command, cwd=ROOT / folder, check=True, capture_output=True)
    return target


def test_the_package_has_the_module_of_vllm_tgis_adapter(tmp_path: Path) -> None:
    build(".", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tgis", "vllm_tgis_adapter"]
    assert (tmp_path / "tgis" / "py.typed").exists()
    assert (tmp_path / "tgis/pb/generation.proto").read_text() == (ROOT / "proto/generation.proto").read_text()
    usage = [sys.executable, "-P", "-m", "vllm_tgis_adapter", "--help"]
    shown = subprocess.check_output(usage, env=os.environ | {"PYTHONPATH": str(tmp_path)}, text=True)
    assert shown.startswith("usage: python -m vllm_tgis_adapter --model-name TEXT [options]")
    assert "[env: PORT] [default: 8000]" in " ".join(shown.split())


# Runs every command; prints the exit code and error of each, and what was imported from other packages.
RUN_COMMANDS = """
import contextlib, io, json, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]  # of the whole tgis
before = set(sys.modules)
from tgis.__main__ import COMMANDS, run
ends = {}
for command in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            code = run([command, "--help"])
        except SystemExit as end:
            code = end.code
    ends[command] = code, stderr.getvalue()
names = {name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {"tgis"}
files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
print(json.dumps([ends, {name: file for name, file in files.items() if "site-packages" in file}]))
"""


def test_the_client_has_the_commands_that_call_a_server(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(build("client", tmp_path))}
    shown = subprocess.check_output([sys.executable, "-P", "-c", RUN_COMMANDS], env=environment, text=True)
    ends, imported = json.loads(shown)
    refused = {command: error for command, (code, error) in ends.items() if code}
    assert ends.keys() - refused.keys() == {"chat", "generate", "tokenize", "model-info", "health", "bench"}
    for command, error in refused.items():
        assert error == f"tgis: tgis {command} needs the server: pip install . in a checkout\n"
    names = {_normal(Requirement(line).name) for line in lines(setup_cfg("client")["options"]["install_requires"])}
    packages = importlib.metadata.packages_distributions()
    # grpc imports its companions where they are installed
    assert {_normal(packages[name][0]) for name in imported} <= with_dependencies(names) | {"grpcio-reflection"}


def with_dependencies(names: set[str]) -> set[str]:
    """These distributions and what they need."""
    found: set[str] = set()
    while left := names - found:
        found |= left
        texts = [text for name in left for text in importlib.metadata.requires(name) or () if "extra ==" not in text]
        wanted = [Requirement(text) for text in texts]
        names = {_normal(each.name) for each in wanted if each.marker is None or each.marker.evaluate()}
    return found


def test_the_client_is_a_part_of_the_server() -> None:
    """The same files are in both: they differ in nothing but what is left out."""
    server, client = setup_cfg(), setup_cfg("client")
    for name in ("version", "license_expression", "project_urls"):
        assert client["metadata"][name] == server["metadata"][name]
    assert client["options"]["python_requires"] == server["options"]["python_requires"]
    for section, name in [("options", "install_requires"), ("options.entry_points", "console_scripts")]:
        assert set(lines(client[section][name])) <= set(lines(server[section][name]))


@pytest.mark.slow
def test_an_installed_client_is_small_and_works(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    of_pip = set(packages.iterdir())
    python, tgis_command = str(tmp_path / "bin" / "python"), str(tmp_path / "bin" / "tgis")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "pip", "install", "--constraint", str(ROOT / "constraints.txt"), str(ROOT / "client")]
    subprocess.run(command, check=True, env=environment)
    files = [file for new in set(packages.iterdir()) - of_pip for file in (new, *new.rglob("*"))]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 60e6
    with running_fake(tmp_path) as server:
        calls = {"generate": ("one two",), "tokenize": ("one two",), "bench": ("--requests", "2", "--quiet")}
        for name, arguments in calls.items():
            assert subprocess.check_output([tgis_command, name, "--target", server.target, *arguments], env={})


def test_the_console_scripts_exist() -> None:
    for script in setup_cfg()["options.entry_points"]["console_scripts"].strip().split("\n"):
        module, _, function = script.partition(" = ")[2].partition(":")
        assert callable(getattr(importlib.import_module(module), function))
