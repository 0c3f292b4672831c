"""Finding models, and reading their configuration."""

import errno
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from model_directories import write_model
from tables import table

from tgis.errors import GrammarError, OptionError, StartError, file_errors, library_errors
from tgis.models import files, staging
from tgis.models.convert.weights import ensure_weights
from tgis.models.files import ModelFiles, eos_token_ids, find_model, find_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SAFETENSORS = struct.pack("<Q", 2) + b"{}"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub cache with one model at COMMIT; returns the model's directory in it."""
    entry = tmp_path / "hub" / "models--org--name"
    write_model(entry / "snapshots" / COMMIT)
    (entry / "refs" / "pr").mkdir(parents=True)
    for ref in ("main", "pr/1"):
        (entry / "refs" / ref).write_text(COMMIT)
    return entry


def test_a_directory(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m", config={"a": 1}, generation_config={"b": 2})
    assert find_model(str(path), None, None) == ModelFiles(path, {"a": 1}, {"b": 2})
    (path / "generation_config.json").unlink()
    assert find_model(str(path), None, None) == ModelFiles(path, {"a": 1}, {})


@pytest.mark.parametrize(
    ("key", "most"),
    [
        *[(key, 10_000) for key in ("num_hidden_layers", "n_layer", "encoder_layers", "num_local_experts")],
        *[(key, 1024) for key in ("num_attention_heads", "n_head", "num_key_value_heads")],
        *[(key, 1 << 24) for key in ("max_position_embeddings", "n_positions")],
    ],
)
def test_more_than_any_model_has(key: str, most: int, tmp_path: Path) -> None:
    """Making their modules and tables would not end, or take all memory."""
    find_model(str(write_model(tmp_path / "m", config={key: most, "num_experts": None})), None, None)
    for config in ({key: 10**9}, {"text_config": {key: 10**9}}):
        with pytest.raises(StartError, match=f"config.json: {key} is 1000000000, at most {most} are allowed"):
            find_model(str(write_model(tmp_path / "m", config=config)), None, None)


def test_a_directory_wins_over_the_cache_if_it_has_a_config(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for revision in (None, "main", "pr/1", COMMIT):
        assert find_model("org/name", revision, str(hub.parent)).path == hub / "snapshots" / COMMIT
    write_model(tmp_path / "org" / "name")
    assert find_model("org/name", None, str(hub.parent)).path == Path("org/name")


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("", None, "'' is not a valid model name"),
        ("org/na\0me", None, "is not a valid model name"),
        ("org/other", None, "no such directory, and no revision 'main' of it in the cache {hub} (see"),
        ("org/name", "v2", "no revision 'v2' of it in the cache {hub}"),
        ("org/name", "../refs", "cannot read model 'org/name'"),
        ("x" * 5000, None, "cannot read model"),
    ],
)
def test_not_found(hub: Path, name: str, revision: str | None, message: str) -> None:
    with pytest.raises(StartError) as caught:
        find_model(name, revision, str(hub.parent))
    assert message.format(hub=hub.parent) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_config(tmp_path: Path, hub: Path) -> None:
    with pytest.raises(StartError, match=f"^{tmp_path} has no config.json$"):
        find_model(str(tmp_path), None, None)
    (hub / "snapshots" / COMMIT / "config.json").unlink()
    with pytest.raises(StartError, match=f"snapshots/{COMMIT} has no config.json$"):
        find_model("org/name", None, str(hub.parent))


BROKEN = {
    "is not valid JSON": [b"", b"\xff\xfe\xfd", b'{"a":' * 100_000],
    "does not hold a JSON object": [b"[1]", b"3"],
    "has more than 600000 bytes": [b"{" + b" " * 600_000],
}


@pytest.mark.parametrize(
    ("message", "content"), [(m, content) for m, contents in BROKEN.items() for content in contents]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json(tmp_path: Path, file: str, content: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 600_000)
    (write_model(tmp_path) / file).write_bytes(content)
    with pytest.raises(StartError, match=f"^{tmp_path}/{file} {message}"):
        find_model(str(tmp_path), None, None)


def write_index(path: Path, weight_map: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(StartError, match=f"^{tmp_path} has no safetensors weights .*: tgis convert-to-safetensors"):
        find_weights(tmp_path)
    write_index(tmp_path, {"w": "b.safetensors", "v": "a.safetensors", "u": "b.safetensors"})
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(SAFETENSORS)
    assert [path.name for path in find_weights(tmp_path)] == ["a.safetensors", "b.safetensors"]


@table("models", "indexes")
def test_a_bad_index(row: dict[str, Any], tmp_path: Path) -> None:
    write_index(tmp_path, row["weight_map"])
    for find in (find_weights, lambda path: ensure_weights(path, tmp_path)):
        with pytest.raises(StartError, match=row["said"]):
            find(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", safetensors.numpy.save({"w": np.ones(9)})[:-1], struct.pack("<Q", 2) + b"\xff\xff"]
)
def test_no_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(StartError, match=r"download: (its header is not JSON|it should have \d+ bytes)$"):
        find_weights(tmp_path)


@table("models", "max_sequence_length")
def test_max_sequence_length(row: dict[str, Any]) -> None:
    assert files.max_sequence_length(row["config"]) == row["expected"]


def test_is_encoder_decoder() -> None:
    assert files.is_encoder_decoder({"is_encoder_decoder": True})
    assert not files.is_encoder_decoder({})
    with pytest.raises(StartError, match="is_encoder_decoder must be true or false, not 'yes'"):
        files.is_encoder_decoder({"is_encoder_decoder": "yes"})


@table("models", "eos_token_ids")
def test_eos_ids(row: dict[str, Any], tmp_path: Path) -> None:
    assert eos_token_ids(ModelFiles(tmp_path, row["config"], row["generation"])) == tuple(row["expected"])


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("a\n b"), StartError, "x /f: a b"),
        (KeyError("k"), OptionError, "x /f: KeyError: 'k'"),
        (ImportError("no module"), StartError, "x /f: no module"),
        (ValueError("y" * 300), StartError, "x /f: " + "y" * 200),
        (GrammarError("of ours"), GrammarError, "of ours"),
        (OSError("odd"), OptionError, "x /f: odd"),
        (OSError(errno.EIO, "broken", "/f"), StartError, "x /f: broken"),
        (OSError(errno.EIO, "broken", "/g"), StartError, "x /f: broken (/g)"),
    ],
)
def test_errors_of_others_are_one_line(error: Exception, kind: type[Exception], text: str) -> None:
    named: Any = kind if issubclass(kind, StartError) else StartError
    with pytest.raises(kind) as caught, (file_errors if isinstance(error, OSError) else library_errors)("x /f", named):
        raise error
    assert (type(caught.value), str(caught.value)) == (kind, text)


@pytest.mark.parametrize("value", ["2", 2.0, True, [1, None], [[2]]])
def test_eos_ids_of_the_wrong_type(tmp_path: Path, value: object) -> None:
    with pytest.raises(StartError, match=r"^config\.json: eos_token_id must be an integer or a list"):
        eos_token_ids(ModelFiles(tmp_path, {"eos_token_id": value}, {}))
    with pytest.raises(StartError, match=r"^generation_config\.json: eos_token_id must be"):
        eos_token_ids(ModelFiles(tmp_path, {}, {"eos_token_id": value}))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("pass", None),
        ("raise ValueError('first\\nlast\\n\\n')", "last"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import os; os.write(2, b'\\xff'); os._exit(3)", "\ufffd"),
        ("raise SystemExit('x' * 10000)", "x" * staging.MAX_REASON_LENGTH),
    ],
)
def test_the_reason_of_a_child_is_one_line(code: str, reason: str | None) -> None:
    assert staging.run_child([sys.executable, "-c", code], 60) == reason


def test_what_identifies_files(tmp_path: Path) -> None:
    keys = set[str]()
    for folder, content, time, other in (
        *[("a", "x", 1, ""), ("b", "x", 1, ""), ("b", "xx", 1, ""), ("b", "xx", 2, ""), ("b", "xx", 2, "v2")],
    ):
        (file := tmp_path / folder / "file").parent.mkdir(exist_ok=True)
        file.write_text(content)
        os.utime(file, ns=(time, time))
        (second := tmp_path / folder / "second").touch()
        keys.add(staging.files_key([file, second], other))
        assert staging.files_key([second, file], other) in keys
    assert len(keys) == 5


def test_the_config_files_of_a_model_replace_others(tmp_path: Path) -> None:
    source, made = tmp_path / "source", tmp_path / "made"
    (source / "folder.json").mkdir(parents=True)
    made.mkdir()
    for name in ("config.json", "tokenizer.model", "chat.jinja", "model.safetensors.index.json", "model.bin"):
        (source / name).write_text("old")
    for name in ("config.json", "model.safetensors", "extra.txt"):
        (made / name).write_text("new")
        (made / name).chmod(0o600)
    staging.replace_config_files(source, made, ("config.json", "*.safetensors*"))
    found = {path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in made.iterdir()}
    kept, added = ("config.json", "model.safetensors"), ("tokenizer.model", "chat.jinja")
    assert found == dict.fromkeys(kept, ("new", 0o644)) | dict.fromkeys(added, ("old", 0o644))


def test_a_child_that_does_not_end_is_killed() -> None:
    assert staging.run_child([sys.executable, "-c", "input()"], 0.01) == "not done after 0 s"
