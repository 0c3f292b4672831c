"""The rooms of the package and the arrows between them, and what each process must not import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository import REPOSITORY

ROOT = REPOSITORY / "tgis"

TABLE: dict[str, Any] = yaml.safe_load((REPOSITORY / "tests/golden/rooms.yaml").read_text())
ALLOWED_IMPORTS: dict[str, str] = TABLE["rooms"]


def room(module: str) -> str:
    """The room of a module or package of tgis."""
    parts = module.split(".")[1:]
    inner = parts[0] in ("api", "engines") and len(parts) > 1 and (ROOT / parts[0] / parts[1]).is_dir()
    return "/".join(parts[: 1 + inner])


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package except the generated stubs, and its file."""
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        if module != "tgis" and not module.startswith("tgis.pb."):
            yield module, path


def imported_rooms(path: Path) -> set[str]:
    """Includes what is not shipped, by its name, which no room may import."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "tgis":
                found |= {room(f"{module}.{name.name}") for name in names}
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in ("demo", "benchmarks", "tests"):
                found.add(module)
            case ast.Import(names=names):
                found |= {room(name.name) for name in names if name.name.startswith("tgis.")}
    return found - {"__version__"}


def test_every_module_is_in_a_room() -> None:
    assert {room(module) for module, _ in modules()} == ALLOWED_IMPORTS.keys()


def test_rooms_import_only_rooms_below() -> None:
    rooms = list(ALLOWED_IMPORTS)
    for floor, allowed in enumerate(ALLOWED_IMPORTS.values()):
        assert set(allowed.split()) <= set(rooms[:floor]), rooms[floor]


def test_a_room_imports_only_what_it_may() -> None:
    for module, path in modules():
        name = room(module)
        assert imported_rooms(path) <= {name, *ALLOWED_IMPORTS[name].split()}, path


IMPORT = """
import importlib, sys
for module, names in {}.items():
    importlib.import_module(module)
    print(*(f"{{module}} imports {{name}}" for name in names.split() if name in sys.modules))
"""


@pytest.mark.parametrize("imports", TABLE["processes"])
def test_a_process_does_not_import_what_it_does_not_need(imports: dict[str, str]) -> None:
    command = [sys.executable, "-c", IMPORT.format(imports)]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split() == []


def test_files_stay_small() -> None:
    """A file holds one idea; 500 lines are the alarm."""
    files = [path for folder in (ROOT, REPOSITORY / "benchmarks") for path in folder.rglob("*.*")]
    ours = [path for path in files if path.suffix in (".py", ".c", ".h") and "pb" not in path.parts]
    assert [path for path in ours if len(path.read_text().splitlines()) > 500] == []
