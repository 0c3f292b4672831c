"""What may be imported where: the arrows between the rooms, and what each process must stay free of."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tgis"

# Each room and the rooms of this package that it may know.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "snapshot": set(),
    "messages": {"prefix", "snapshot"},
    "prefix": set(),
    "batcher": {"errors", "messages", "snapshot"},
    "engines": {"batcher", "messages", "errors", "prefix", "prompts"},
    "link": {"messages"},
    "prompts": {"errors", "messages", "prefix", "watch"},
    "worker": {"batcher", "engines", "messages", "errors", "link", "logs", "prefix", "prompts"},
    "follower": {"engines", "link", "logs", "messages"},
    "simulate": {"batcher", "engines", "errors", "messages"},
    "validation": {"errors", "messages", "prefix"},
    "tokenizer": {"errors", "models"},
    "detokenizer": {"errors", "tokenizer"},
    "stopping": set(),
    "inbox": {"errors", "messages"},
    "inspection": {"errors", "snapshot"},
    "prompt_lookups": {"errors", "messages", "prefix"},
    "engine_client": {"errors", "inbox", "inspection", "messages", "prefix", "prompt_lookups", "snapshot"},
    "replies": {"detokenizer", "stopping", "tokenizer", "inbox", "messages", "validation"},
    "accounts": {"errors", "messages", "metrics", "replies", "validation"},
    "adapters": {"engine_client", "errors", "metrics", "prefix"},
    "tokenization": {"adapters", "metrics", "tokenizer"},
    "generation": {
        "accounts",
        "adapters",
        "engine_client",
        "errors",
        "messages",
        "metrics",
        "prefix",
        "replies",
        "tokenization",
        "tokenizer",
        "validation",
    },
    "convert": {"generation", "messages", "metrics", "pb", "replies", "tokenization", "validation"},
    "service": {"convert", "errors", "generation", "identity", "logs", "pb"},
    "families": set(),
    "metrics": {"families", "messages"},
    "logs": set(),
    "batch_view": {"snapshot"},
    "probes": {"batch_view", "errors", "snapshot"},
    "watch": set(),
    "tls": {"errors", "watch"},
    "auth": {"errors", "watch"},
    "identity": {"auth"},
    "listener": {"auth", "errors", "pb", "tls"},
    "options": {"errors"},
    "config": {"auth", "errors", "options", "tls"},
    "models": {"errors", "logs"},
    "pb": set(),
}


def imports(path: Path) -> set[str]:
    """Rooms of this package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module="tgis", names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(module)) if module.startswith("tgis."):
                found.add(module.split(".")[1])
            case ast.Import(names=names):
                found |= {n.name.split(".")[1] for n in names if n.name.startswith("tgis.")}
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_point_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]
    assert files
    for file in files:
        assert imports(file) <= MAY_IMPORT[room] | {room}, file


@pytest.mark.parametrize(
    ("module", "strangers"),
    [
        ("tgis.server", {"torch", "transformers"}),
        ("tgis.cli.generate", {"torch", "transformers", "tokenizers"}),
        ("tgis.batcher.batcher", {"torch", "transformers", "grpc", "asyncio", "socket"}),
        ("tgis.worker", {"torch", "transformers", "grpc", "aiohttp"}),
        ("tgis.engines.fake", {"torch", "transformers"}),
        ("tgis.cli.simulate", {"torch", "transformers", "grpc", "matplotlib"}),
    ],
)
def test_a_process_stays_free_of_what_it_does_not_need(module: str, strangers: set[str]) -> None:
    code = f"import sys, {module}; print(*{strangers!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == []


def test_files_stay_small() -> None:
    """A module of more than 300 lines is two modules."""
    sizes = {str(p): len(p.read_text().splitlines()) for p in ROOT.rglob("*.py") if "pb" not in p.parts}
    assert {path: size for path, size in sizes.items() if size > 300} == {}
