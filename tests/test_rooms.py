"""The rooms of the package and the arrows between them, and what each process must not import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import REPOSITORY

ROOT = REPOSITORY / "tgis"

# From the ground floor up: each room, and the rooms below that it may import. `/` names a room inside a room.
ALLOWED_IMPORTS: dict[str, str] = {
    "errors": "",
    "tracing": "",
    "pb": "",
    "ipc": "",
    "utils": "errors",
    "foreign_options": "errors utils",
    "speculative_config": "errors utils",
    "defaults": "utils",
    "config": "defaults errors foreign_options speculative_config tracing utils",
    "environment": "config errors utils",
    "security": "errors utils",
    "models": "errors utils",
    "prompts": "errors ipc utils",
    "structured_output": "errors ipc utils",
    # the front-end process
    "frontend": "errors ipc models structured_output tracing utils",
    "api": "errors",
    "api/grpc": "api config errors frontend ipc models pb security tracing utils",
    "api/http": "api config errors frontend ipc security utils",
    "api/openai": "api/http config errors frontend ipc models prompts utils",
    "api/tgi": "api/http api/openai config errors frontend ipc utils",
    "startup_log": "config ipc utils",
    "limits": "config errors frontend ipc models",
    "node": "api/http config errors frontend ipc limits utils",
    "prepare": "config errors frontend ipc limits models security utils",
    "apis": "api/grpc api/http api/openai api/tgi frontend prepare prompts",
    "server": ("api/http api/openai apis config errors frontend ipc limits node prepare startup_log tracing utils"),
    # the engine process
    "speculation": "",
    "batcher": "errors ipc speculation",
    "engines": "batcher errors ipc",
    "engines/quantization": "errors ipc models",
    "engines/kernels": "engines engines/quantization errors utils",
    "engines/sharding": "engines/kernels engines/quantization errors ipc",
    "engines/memory": "batcher engines engines/quantization errors ipc utils",
    "engines/loading": (
        "batcher engines engines/kernels engines/memory engines/quantization engines/sharding errors ipc utils"
    ),
    "engines/lora": "batcher engines engines/kernels prompts",
    "engines/sampling": "batcher engines engines/kernels errors ipc",
    "engines/padded": (
        "batcher engines engines/kernels engines/loading engines/lora engines/memory engines/sampling engines/sharding"
        " errors ipc"
    ),
    "engines/onnx": (
        "batcher engines engines/loading engines/lora engines/memory engines/padded engines/sampling errors ipc"
    ),
    "engines/speculation": "batcher engines engines/loading engines/memory engines/quantization errors ipc utils",
    "engines/paged": (
        "batcher engines engines/kernels engines/loading engines/lora engines/memory engines/sampling "
        "engines/sharding engines/speculation errors ipc prompts utils"
    ),
    "engines/distributed": (
        "batcher engines engines/kernels engines/loading engines/lora engines/paged engines/sharding errors ipc "
        "prompts utils"
    ),
    "engine_core": "batcher engines errors ipc prompts structured_output utils",
    # the command line
    "bench": "errors pb utils",
    "cli": "bench config engines environment errors ipc models pb prepare prompts server utils",
    "__main__": "environment errors utils",
    "vllm_tgis_adapter": "__main__",
}


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


# What processes import, and what must not have been imported after that.
IMPORTS: list[dict[str, str]] = [
    {
        "tgis.__main__": "torch transformers grpc aiohttp argparse",
        "tgis.batcher.batcher": "torch transformers grpc asyncio socket",
        "tgis.engine_core.main": "torch transformers grpc aiohttp",
        "tgis.config": "torch transformers grpc aiohttp",
        "tgis.cli.download_weights": "torch transformers grpc",
        "tgis.cli.convert": "torch transformers grpc",
        "tgis.cli.serve": "torch transformers grpc",
        "tgis.engines.fake": "torch transformers",
        "tgis.server": "torch transformers smg_grpc_proto",
        "tgis.cli.prompts": "torch transformers",
    },
    {
        "tgis.cli.generate": "torch transformers tokenizers numpy aiohttp",
        "tgis.cli.bench": "torch transformers tokenizers numpy aiohttp",
        "tgis.cli.chat": "torch transformers",
    },
]
IMPORT = """
import importlib, sys
for module, names in {}.items():
    importlib.import_module(module)
    print(*(f"{{module}} imports {{name}}" for name in names.split() if name in sys.modules))
"""


@pytest.mark.parametrize("imports", IMPORTS)
def test_a_process_does_not_import_what_it_does_not_need(imports: dict[str, str]) -> None:
    command = [sys.executable, "-c", IMPORT.format(imports)]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split() == []


def test_files_stay_small() -> None:
    """A file holds one idea; 500 lines are the alarm."""
    files = [path for folder in (ROOT, REPOSITORY / "benchmarks") for path in folder.rglob("*.*")]
    ours = [path for path in files if path.suffix in (".py", ".c", ".h") and "pb" not in path.parts]
    assert [path for path in ours if len(path.read_text().splitlines()) > 500] == []
