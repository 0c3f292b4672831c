"""Finding models, and reading their configuration."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from model_directories import write_model

from tgis.errors import StartError
from tgis.models import files, staging
from tgis.models.files import ModelFiles, eos_token_ids, find_model, find_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SAFETENSORS = struct.pack("<Q", 2) + b"{}"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A hub cache with one model at COMMIT; returns the model's directory in it."""
    entry = tmp_path / "hub" / "models--org--name"
    write_model(entry / "snapshots" / COMMIT)
    (entry / "refs" / "pr").mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    (entry / "refs" / "pr" / "1").write_text(COMMIT)
    return entry


class TestFindModel:
    def test_a_directory(self, tmp_path: Path) -> None:
        path = write_model(tmp_path / "m", config={"a": 1}, generation_config={"b": 2})
        assert find_model(str(path), None, None) == ModelFiles(path, {"a": 1}, {"b": 2})
        (path / "generation_config.json").unlink()
        assert find_model(str(path), None, None) == ModelFiles(path, {"a": 1}, {})

    @pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "encoder_layers", "num_local_experts"])
    def test_more_layers_than_any_model_has(self, key: str, tmp_path: Path) -> None:
        """Making their modules would not end."""
        find_model(str(write_model(tmp_path / "m", config={key: 10_000, "num_experts": None})), None, None)
        for config in ({key: 10**9}, {"text_config": {key: 10**9}}):
            with pytest.raises(StartError, match=f"config.json: {key} is 1000000000, at most 10000 are allowed"):
                find_model(str(write_model(tmp_path / "m", config=config)), None, None)

    @pytest.mark.parametrize("revision", [None, "main", "pr/1", COMMIT])
    def test_the_cache(self, hub: Path, revision: str | None) -> None:
        assert find_model("org/name", revision, str(hub.parent)).path == hub / "snapshots" / COMMIT

    def test_a_directory_wins_over_the_cache_if_it_has_a_config(
        self, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "org" / "name").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        assert find_model("org/name", None, str(hub.parent)).path.name == COMMIT
        write_model(tmp_path / "org" / "name")
        assert find_model("org/name", None, str(hub.parent)).path == Path("org/name")

    @pytest.mark.parametrize(
        ("name", "revision", "message"),
        [
            ("", None, "'' is not a valid model name"),
            ("org/na\0me", None, "is not a valid model name"),
            ("org/name\n", None, "is not a valid model name"),
            (
                "org/other",
                None,
                "no such directory, and no revision 'main' of it in the cache {hub} (see",
            ),
            ("org/name", "v2", "no revision 'v2' of it in the cache {hub}"),
            ("org/name", "../refs", "cannot read model 'org/name'"),
            ("x" * 5000, None, "cannot read model"),
        ],
    )
    def test_not_found(self, hub: Path, name: str, revision: str | None, message: str) -> None:
        with pytest.raises(StartError) as caught:
            find_model(name, revision, str(hub.parent))
        assert message.format(hub=hub.parent) in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("content", [b"", b"\n", b"a/b", b"a\nb", b"\xff" * 5000])
    def test_a_broken_ref(self, hub: Path, content: bytes) -> None:
        (hub / "refs" / "main").write_bytes(content)
        with pytest.raises(StartError, match=r"no revision 'main' of it|has no config\.json") as caught:
            find_model("org/name", None, str(hub.parent))
        assert "\n" not in str(caught.value)

    def test_no_cache(self) -> None:
        with pytest.raises(StartError, match="no such directory"):
            find_model("org/name", None, None)

    def test_no_config(self, tmp_path: Path, hub: Path) -> None:
        with pytest.raises(StartError, match=f"^{tmp_path} has no config.json$"):
            find_model(str(tmp_path), None, None)
        (hub / "snapshots" / COMMIT / "config.json").unlink()
        with pytest.raises(StartError, match=f"snapshots/{COMMIT} has no config.json$"):
            find_model("org/name", None, str(hub.parent))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is not valid JSON"),
            (b'{"a": ', "is not valid JSON"),
            (b"\xff\xfe\xfd", "is not valid JSON"),
            (b'{"a":' * 100_000, "is not valid JSON"),
            (b"[1]", "does not hold a JSON object"),
        ],
    )
    @pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
    def test_broken_json(self, tmp_path: Path, file: str, content: bytes, message: str) -> None:
        (write_model(tmp_path) / file).write_bytes(content)
        with pytest.raises(StartError, match=f"^{tmp_path}/{file} {message}"):
            find_model(str(tmp_path), None, None)


class TestFindWeights:
    def test_one_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
        assert find_weights(tmp_path) == (tmp_path / "model.safetensors",)

    def index(self, path: Path, weight_map: object) -> None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    def test_shards(self, tmp_path: Path) -> None:
        self.index(tmp_path, {"w": "b.safetensors", "v": "a.safetensors", "u": "b.safetensors"})
        for name in "ab":
            (tmp_path / f"{name}.safetensors").write_bytes(SAFETENSORS)
        assert [path.name for path in find_weights(tmp_path)] == ["a.safetensors", "b.safetensors"]

    def test_none(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(StartError, match=f"^{tmp_path} has no safetensors weights"):
            find_weights(tmp_path)

    @pytest.mark.parametrize(
        ("weight_map", "message"),
        [
            ({"w": "a.safetensors"}, "names a.safetensors, which is missing"),
            ({"w": "../a.safetensors"}, "which is no file name"),
            ({"w": 3}, "which is no file name"),
            ({"w": "a\nb"}, r"names 'a\\nb', which is no file name"),
            ({}, "has no weight_map"),
        ],
    )
    def test_a_bad_index(self, tmp_path: Path, weight_map: object, message: str) -> None:
        self.index(tmp_path, weight_map)
        with pytest.raises(StartError, match=message):
            find_weights(tmp_path)

    @pytest.mark.parametrize(
        "content",
        [
            *(b"", SAFETENSORS[:-1], b"version https://git-lfs.github.com/spec/v1\noid sha256:"),
            safetensors.numpy.save({"w": np.ones(9)})[:-1],
            struct.pack("<Q", 2) + b"\xff\xff",
        ],
    )
    def test_no_safetensors_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(StartError, match="is not a safetensors file"):
            find_weights(tmp_path)


class TestFacts:
    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({"n_positions": 5, "max_position_embeddings": 7}, 7),
            ({"seq_len": 1, "max_seq_length": 2, "max_sequence_length": 3}, 3),
            ({"max_position_embeddings": -1, "n_positions": 5}, 5),
            ({"max_position_embeddings": None, "seq_length": 5}, 5),
            ({"text_config": {"seq_len": 4}, "max_position_embeddings": 8}, 8),
            ({"text_config": {"seq_len": 4}}, 4),
            ({"text_config": [4]}, 2048),
            ({}, 2048),
        ],
    )
    def test_max_sequence_length(self, config: dict[str, Any], expected: int) -> None:
        assert files.max_sequence_length(config) == expected

    def test_is_encoder_decoder(self) -> None:
        assert files.is_encoder_decoder({"is_encoder_decoder": True})
        assert not files.is_encoder_decoder({})
        with pytest.raises(StartError, match="is_encoder_decoder must be true or false, not 'yes'"):
            files.is_encoder_decoder({"is_encoder_decoder": "yes"})

    @pytest.mark.parametrize(
        ("config", "generation", "expected"),
        [
            ({"eos_token_id": 2}, {}, (2,)),
            ({"eos_token_id": [2, 5]}, {"eos_token_id": [7, 2]}, (2, 5, 7)),
            ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
            ({"text_config": {"eos_token_id": 4}}, {"eos_token_id": [1]}, (4, 1)),
            ({"eos_token_id": None, "text_config": {"eos_token_id": 4}}, {}, (4,)),
            ({"eos_token_id": -1}, {"eos_token_id": 3}, (3,)),
            ({}, {}, ()),
        ],
    )
    def test_eos_ids(
        self, tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], expected: tuple[int, ...]
    ) -> None:
        assert eos_token_ids(ModelFiles(tmp_path, config, generation)) == expected

    @pytest.mark.parametrize("value", ["2", 2.0, True, [1, None], [[2]], {"id": 2}])
    def test_eos_ids_of_the_wrong_type(self, tmp_path: Path, value: object) -> None:
        with pytest.raises(StartError, match=r"^config\.json: eos_token_id must be an integer or a list"):
            eos_token_ids(ModelFiles(tmp_path, {"eos_token_id": value}, {}))
        with pytest.raises(StartError, match=r"^generation_config\.json: eos_token_id must be"):
            eos_token_ids(ModelFiles(tmp_path, {}, {"eos_token_id": value}))


class TestChild:
    def run(self, code: str, seconds: float = 60) -> str | None:
        return staging.run_child([sys.executable, "-c", code], seconds)

    def test_the_reason_is_one_line(self) -> None:
        assert self.run("pass") is None
        assert self.run("raise ValueError('first\\nlast\\n\\n')") == "last"
        assert self.run("raise SystemExit(3)") == "exit code 3"
        assert len(self.run("raise ValueError('x' * 10000)") or "") == staging.MAX_REASON_LENGTH
        assert self.run("import time; time.sleep(60)", seconds=0.1) == "not done after 0 s"


def test_torch_is_not_imported() -> None:
    code = "import sys, tgis.models.files; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
