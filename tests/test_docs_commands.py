"""Runs the commands of README.md and docs/*.md in a copy of the clone, page by page and in order.

A fenced block of `sh` or `python` is run, unless the line above says why not: *Not run by the tests: needs a cluster.*
Those of docs/clients.md are run by tests/clients.
The block `text` after it is what it prints, with `...` for whatever differs. A block that serves runs until the next
one that does; ports are replaced by free ones.
"""

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import Server, running_command
from repository import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
WITHOUT_COMMANDS = [REPOSITORY / name for name in ("CHANGELOG.md", "SECURITY.md", "tests/golden/README.md")]
WITHOUT_COMMANDS += sorted((REPOSITORY / "docs/notes").glob("*.md"))
_BLOCK = re.compile(
    r"(?:^\*Not run by the tests: (?P<reason>.+)\.\*\n\n)?^```(?P<language>sh|python)\n(?P<code>(?:.*\n)*?)```$"
    r"(?:\n\n```text\n(?P<shown>(?:.*\n)*?)```$)?",
    re.MULTILINE,
)
_SERVES = re.compile(r"^make serve\b|tgis serve\b(?! --check)", re.MULTILINE)
_CALLS = re.compile(r"(tgis (?:generate|chat|health))\b")
_PROGRAMS = ("bash", "curl", "make", "openssl", f"{sys.prefix}/bin/grpcurl")
# A start with the defaults takes fifteen seconds, to measure memory and to fill the KV cache.
_OPTIONS = {"MAX_SEQUENCE_LENGTH": 256, "MAX_BATCH_SIZE": 4, "KV_CACHE_SIZE_MB": 32}
_VARIABLES_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "MODEL", "PYTHON", "WORKERS")


class Block(NamedTuple):
    """Commands, why they are not run, and what the page shows of their output."""

    reason: str | None
    language: str
    code: str
    shown: str | None


def blocks(page: Path) -> list[Block]:
    return [Block(*match.groups()) for match in _BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize("page", [*PAGES, *WITHOUT_COMMANDS], ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_somewhere_and_no_block_is_forgotten(page: Path) -> None:
    text = page.read_text()
    assert text.count("*Not run by the tests") == len([block for block in blocks(page) if block.reason])
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


class Clone:
    """Links to the repository's files and to the environment of the tests, with a cache of its own; and a server."""

    def __init__(self, root: Path, models: Path) -> None:
        self.root = root
        self.server: Server | None = None
        self._servers = contextlib.ExitStack()
        for target, folder in ((REPOSITORY, root), (Path(sys.prefix), root / ".venv")):
            folder.mkdir()
            for each in target.iterdir():
                if each.name not in (".venv", ".cache", "installed"):
                    (folder / each.name).symlink_to(each)
        (root / ".venv/installed").touch()  # so that make installs nothing
        (root / ".cache").mkdir()
        (root / ".cache/models").symlink_to(models)
        (root / ".curlrc").write_text("silent\nshow-error\nfail\n")

    def close(self) -> None:
        self._servers.close()
        self.server = None

    def run(self, block: Block) -> None:
        if _SERVES.search(block.code):
            self._serve(block.code)
            return
        if self.server is None and "localhost:" in block.code:
            self._serve("make serve")
        command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-eo", "pipefail", "-c"]
        with (self.root / "output").open("w+") as output:
            done = subprocess.run(
                [*command, self._with_ports(block.code)], cwd=self.root, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, timeout=120, check=False,
            )  # fmt: skip
        printed = (self.root / "output").read_text()
        assert done.returncode == 0, f"{block.code}\n{printed}"
        if block.shown is not None:
            assert is_shown(printed, block.shown), f"{block.code}\n{printed}\nis not\n{block.shown}"

    def _serve(self, code: str) -> None:
        self._servers.close()
        code = code.replace("--http-api-port 3001", "--http-api-port 0")
        running = running_command(["bash", "-ec", code], self.root.parent, cwd=self.root, **_OPTIONS)
        self.server = self._servers.enter_context(running)

    def _with_ports(self, code: str) -> str:
        if (server := self.server) is None:
            return code
        for port, real in ((8033, server.grpc_port), (3000, server.http_port), (3001, server.api_port)):
            code = code.replace(f"localhost:{port}", f"localhost:{real}")

        def with_target(call: re.Match[str]) -> str:
            port = server.http_port if call[0].endswith("chat") else server.grpc_port
            return f"{call[0]} --target localhost:{port}"

        return _CALLS.sub(with_target, code)


@pytest.fixture(scope="module")
def clone(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    if missing := [program for program in _PROGRAMS if not shutil.which(program)]:
        pytest.skip(f"no {' and no '.join(missing)}")
    clone = Clone(tmp_path_factory.mktemp("docs") / "clone", smollm2_dir.parent)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(clone):
        for name in _VARIABLES_OF_MAKE:
            patch.delenv(name, raising=False)
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("CURL_HOME", str(clone.root))
        patch.setenv("TQDM_DISABLE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield clone


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page) and page.name != "clients.md"],
    ids=lambda page: f"{page.parent.name}/{page.stem}",
)
def test_the_commands_work(page: Path, clone: Clone) -> None:
    for block in blocks(page):
        if not block.reason:
            clone.run(block)
    if any(_SERVES.search(block.code) for block in blocks(page)):
        clone.close()  # the next page expects a server with the defaults


def is_shown(printed: str, shown: str) -> bool:
    """Whether that is the output but for blanks, and for what `...` stands for."""
    parts = [r"\s*".join(map(re.escape, part.split())) for part in shown.split("...")]
    return re.fullmatch(r"\s*{}\s*".format(r"\s*.*?\s*".join(parts)), printed, re.DOTALL) is not None
