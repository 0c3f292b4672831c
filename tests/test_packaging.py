"""Packages: what they contain."""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

from tgis import __version__

ROOT = Path(__file__).parents[1]


def setup_cfg(folder: str = ".") -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / folder / "setup.cfg")
    return parser


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def build(folder: str, target: Path) -> dict[str, str]:
    """Build the Python part of a distribution; the variables of a process that imports it."""
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "build_py", "-d", str(target)]
    subprocess.run(command, cwd=ROOT / folder, check=True, capture_output=True)
    return os.environ | {"PYTHONPATH": str(target)}


def test_images_and_the_changelog_have_the_version_of_the_package() -> None:
    pages = [*(ROOT / "deployment").rglob("*.yaml"), ROOT / "docs/deploying.md"]
    tags = {tag for page in pages for tag in re.findall(r"(?:image: tgis:|newTag: )([\d.]+)", page.read_text())}
    changes = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert tags == {changes[0]} == {__version__}


def test_the_source_distribution_has_the_kernels_and_no_tests(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    files = (tmp_path / "tgis.egg-info" / "SOURCES.txt").read_text().splitlines()
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "tgis").rglob("csrc/*.[ch]")} <= set(files)
    assert [file for file in files if file.startswith("tests")] == []


def test_the_package_has_every_module_and_that_of_vllm_tgis_adapter(tmp_path: Path) -> None:
    environ = build(".", tmp_path)
    for path in (ROOT / "tgis").rglob("*.py"):
        assert (tmp_path / path.relative_to(ROOT)).exists() or "vllm_tgis_adapter" in path.parts
    assert (tmp_path / "tgis" / "py.typed").exists()
    assert (tmp_path / "tgis/pb/generation.proto").read_text() == (ROOT / "proto/generation.proto").read_text()
    shown = subprocess.check_output([sys.executable, "-P", "-m", "vllm_tgis_adapter", "--help"], env=environ, text=True)
    assert shown.startswith("usage: python -m vllm_tgis_adapter MODEL [options]")


# Runs the help of every command without the packages of the server; prints the commands that succeed.
RUN_COMMANDS = """
import contextlib, io, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]  # of the whole tgis
sys.modules |= dict.fromkeys(("torch", "transformers", "tokenizers", "aiohttp", "numpy", "huggingface_hub", "jinja2"))
from tgis.__main__ import COMMANDS, run
for command in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        if run([command, "--help"]):
            continue
    print(command)
"""


def test_the_client_has_the_commands_that_call_a_server(tmp_path: Path) -> None:
    environ = build("client", tmp_path)
    server, client = setup_cfg()["options"], setup_cfg("client")["options"]
    assert set(lines(client["install_requires"])) <= set(lines(server["install_requires"]))
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN_COMMANDS], env=environ, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {"chat", "generate", "verify", "tokenize", "model-info", "health", "bench"}
    assert "tgis: tgis serve needs the server: pip install . in a checkout\n" in done.stderr
