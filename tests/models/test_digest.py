"""The digest of a model's files: all that decides answers, and nothing else."""

from pathlib import Path

import pytest

from tgis.models.digest import deciding_files, digest_file


def digests(model: Path) -> list[bytes]:
    return [*map(digest_file, deciding_files([model / "model.safetensors"], model, model))]


@pytest.mark.parametrize(
    ("name", "decides"),
    [
        ("model.safetensors", True),
        ("config.json", True),
        ("tokenizer.json", True),
        ("chat_template.jinja", True),
        ("README.md", False),
    ],
)
def test_a_changed_byte(tmp_path: Path, name: str, decides: bool) -> None:
    for path in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / path).write_bytes(b"x" * 100_000)
    before = digests(tmp_path)
    assert before[1] != before[2]  # names count
    (tmp_path / name).write_bytes(b"x" * 70_000 + b"y" + b"x" * 29_999)
    assert (digests(tmp_path) != before) is decides
