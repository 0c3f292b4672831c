"""What may be imported where: the arrows between the rooms, and what each process must stay free of."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tgis"

# Each room and the rooms of this package that it may import; `/` names a room inside a room.
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "pb": set(),
    "utils": {"errors"},
    "security": {"errors", "utils"},
    "ipc": {"errors"},
    "models": {"errors", "utils"},
    "config": {"errors", "utils"},
    "frontend": {"errors", "ipc", "models"},
    "api/grpc": {"config", "errors", "frontend", "ipc", "pb", "security", "utils"},
    "api/http": {"errors", "ipc"},
    "server": {"api/grpc", "api/http", "config", "errors", "frontend", "ipc", "models", "security"},
    "batcher": {"errors", "ipc"},
    "prompts": {"errors", "ipc", "models", "utils"},
    "engine_core": {"batcher", "engines", "errors", "ipc", "prompts", "utils"},
    "engines": {"batcher", "errors", "ipc"},
    "engines/kernels": {"errors", "utils"},
    "engines/memory": {"batcher", "engines", "engines/padded", "errors", "ipc"},
    "engines/loading": {"engines/kernels", "engines/memory", "engines/padded", "errors", "ipc", "utils"},
    "engines/lora": {"batcher", "engines/kernels", "engines/loading", "prompts"},
    "engines/sampling": {"batcher", "engines", "engines/kernels", "ipc"},
    "engines/padded": {
        "batcher",
        "engines",
        "engines/loading",
        "engines/lora",
        "engines/memory",
        "engines/sampling",
        "errors",
        "ipc",
    },
    "engines/onnx": {
        "batcher",
        "engines/loading",
        "engines/lora",
        "engines/padded",
        "engines/sampling",
        "errors",
        "ipc",
    },
    "engines/paged": {
        "batcher",
        "engines",
        "engines/kernels",
        "engines/loading",
        "engines/lora",
        "engines/memory",
        "engines/sampling",
        "errors",
        "ipc",
        "prompts",
        "utils",
    },
    "engines/distributed": {
        "batcher",
        "engines",
        "engines/loading",
        "engines/lora",
        "engines/paged",
        "errors",
        "ipc",
        "prompts",
        "utils",
    },
}


def room(module: str) -> str:
    """The room of a module or package of tgis."""
    parts = module.split(".")[1:]
    inner = parts[0] in ("api", "engines") and len(parts) > 1 and (ROOT / parts[0] / parts[1]).is_dir()
    return "/".join(parts[: 1 + inner])


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "tgis":
                found |= {room(f"{module}.{name.name}") for name in names}
            case ast.Import(names=names):
                found |= {room(name.name) for name in names if name.name.startswith("tgis.")}
    return found - {"__version__"}


@pytest.mark.parametrize("name", ALLOWED_IMPORTS)
def test_arrows_point_one_way(name: str) -> None:
    candidates = (ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / f"{name}.py"]
    files = [path for path in candidates if room(".".join(path.relative_to(ROOT.parent).with_suffix("").parts)) == name]
    assert files
    for file in files:
        assert imported_rooms(file) <= ALLOWED_IMPORTS[name] | {name}, file


@pytest.mark.parametrize(
    ("module", "strangers"),
    [
        ("tgis.server", {"torch", "transformers"}),
        ("tgis.cli.generate", {"torch", "transformers", "tokenizers"}),
        ("tgis.batcher.batcher", {"torch", "transformers", "grpc", "asyncio", "socket"}),
        ("tgis.engine_core.main", {"torch", "transformers", "grpc", "aiohttp"}),
        ("tgis.engines.fake", {"torch", "transformers"}),
        ("tgis.cli.download_weights", {"torch", "transformers", "grpc"}),
        ("tgis.cli.convert_to_fast_tokenizer", {"torch", "transformers", "grpc"}),
        ("tgis.cli.convert_to_safetensors", {"torch", "transformers", "grpc"}),
        ("tgis.cli.convert_to_onnx", {"torch", "transformers", "grpc"}),
        ("tgis.cli.simulate", {"torch", "transformers", "grpc", "matplotlib"}),
    ],
)
def test_a_process_stays_free_of_what_it_does_not_need(module: str, strangers: set[str]) -> None:
    code = f"import sys, {module}; print(*{strangers!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == []


def test_files_stay_small() -> None:
    """A file holds one idea; 500 lines are the alarm."""
    sizes = {str(p): len(p.read_text().splitlines()) for p in ROOT.rglob("*.py") if "pb" not in p.parts}
    assert {path: size for path, size in sizes.items() if size > 500} == {}
