"""Model directories with nothing but JSON files."""

import json
from pathlib import Path


def write_model(path: Path, **extra: object) -> Path:
    """A directory with config.json and any other JSON files, named without their suffix."""
    path.mkdir(parents=True, exist_ok=True)
    for name, value in {"config": {"model_type": "gpt2"}, **extra}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path
