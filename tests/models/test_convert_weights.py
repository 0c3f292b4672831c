"""Conversion of .bin weights: bit-identical safetensors, or no change at all."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    T5Config,
)

from demo.fake_model import make_fake_model
from tgis.config import parse
from tgis.errors import StartError
from tgis.models import staging
from tgis.models.convert import weights, weights_child
from tgis.models.files import find_weights
from tgis.prepare import prepare

CONFIGS: dict[str, PreTrainedConfig] = {
    "tied": GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, bos_token_id=0, eos_token_id=0),
    "untied": LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=40
    ),
    "encoder-decoder": T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=40),
}


def loaded(path: Path, safetensors: bool) -> dict[str, torch.Tensor]:
    """Every tensor of the model as loaded by transformers; none may be newly initialized."""
    auto = (
        AutoModelForSeq2SeqLM
        if 'is_encoder_decoder": true' in (path / "config.json").read_text()
        else AutoModelForCausalLM
    )
    model, told = auto.from_pretrained(
        path, use_safetensors=safetensors, local_files_only=True, output_loading_info=True, dtype=torch.float32
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in this process, since importing transformers takes seconds."""

    def run(command: list[str], seconds: float | None) -> str | None:
        monkeypatch.setattr(sys, "argv", command[2:])
        try:
            weights_child.main()
        except SystemExit as left:
            return str(left.code)
        return None

    monkeypatch.setattr(staging, "run_child", run)


def made_of(kind: str) -> Any:
    torch.manual_seed(1)
    config = CONFIGS[kind]
    return (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Write a model with weights in the format before safetensors."""

    def write(kind: str, shards: int = 1, old: bool = False, wrapped: bool = False) -> Path:
        path, net = tmp_path / "model", made_of(kind)
        net.config.architectures = [type(net).__name__]
        net.config.save_pretrained(path)
        state = net.state_dict()
        names, places = list(state), dict[str, str]()
        for shard in range(shards):
            part = {name: state[name] for name in names[shard::shards]}
            file = f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin" if shards > 1 else "pytorch_model.bin"
            content = {"state_dict": part, "epoch": 3} if wrapped else part
            torch.save(content, path / file, _use_new_zipfile_serialization=not old)
            places |= dict.fromkeys(part, file)
        if shards > 1:
            index = {"metadata": {"total_size": 7}, "weight_map": places}
            (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        return path

    return write


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_model_stays_the_same(model: Callable[..., Path], kind: str, shards: int) -> None:
    path = model(kind, shards)
    before = loaded(path, safetensors=False)
    assert "converted to safetensors" in weights.convert_weights(path)
    assert len(find_weights(path)) == shards
    times = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    assert "already: nothing to do (delete it to convert again)" in weights.convert_weights(path)
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == times
    for file in path.glob("*.bin*"):
        file.unlink()
    assert same(before, loaded(path, safetensors=True))
    assert not list(path.glob(".*"))


@pytest.mark.parametrize("form", ["old", "wrapped"])
def test_other_forms(model: Callable[..., Path], form: str) -> None:
    path = model("untied", **{form: True})
    weights.convert_weights(path)
    assert same(load_file(path / "model.safetensors"), made_of("untied").state_dict())


def test_the_index_and_permissions(model: Callable[..., Path]) -> None:
    path = model("tied", 2)
    left = path / ".safetensors-x"  # of a killed process
    left.mkdir()
    for number in (1, 2):  # but no index
        (path / f"model-0000{number}-of-00002.safetensors").touch()
    weights.convert_weights(path)
    assert not left.exists()
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 7}
    held = {name: file.name for file in path.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == held
    assert set(held.values()) == {f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in path.glob("*.safetensors"))


def test_every_view_of_a_tensor_is_kept(tmp_path: Path) -> None:
    data = torch.randn(6, 8)
    tensors = {"all": data, "again": data, "rows": data[2:4], "columns": data[:, 1:3], "turned": data.T}
    tensors |= {"flat": data.view(48), "end": torch.randn(100)[90:]}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    weights.convert_weights(tmp_path)
    assert same(load_file(tmp_path / "model.safetensors"), tensors)


def refused(path: Path) -> str:
    """Why the conversion is refused, which changes nothing."""
    before = sorted(path.iterdir())
    with pytest.raises(StartError) as caught:
        weights.convert_weights(path)
    assert sorted(path.iterdir()) == before
    message = str(caught.value)
    assert message.startswith(f"cannot convert the weights in {path}: ")
    assert "\n" not in message
    return message.removeprefix(f"cannot convert the weights in {path}: ")


def test_code_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path.parent / "ran",)

    torch.save({"w": torch.ones(2), "x": Evil()}, tmp_path / "pytorch_model.bin")
    assert refused(tmp_path) == "pytorch_model.bin is broken, or holds more than tensors, which is never loaded"
    assert not (tmp_path.parent / "ran").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(2)], "pytorch_model.bin holds a list, not tensors by name"),
        ({"epoch": 3}, "pytorch_model.bin holds 'epoch', which is no tensor with a name"),
        ({3: torch.ones(2)}, "pytorch_model.bin holds 3, which is no tensor with a name"),
        ({"w": torch.eye(3).to_sparse()}, "pytorch_model.bin holds 'w', which is not dense, or larger"),
        ({"w": torch.ones(1).expand(9)}, "pytorch_model.bin holds 'w', which is not dense, or larger"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert refused(tmp_path).startswith(message)


def test_broken_and_missing_files_are_refused(model: Callable[..., Path]) -> None:
    path = model("tied", 2)
    file = path / "pytorch_model-00002-of-00002.bin"
    for broken in (b"", b"version https://git-lfs.github.com/spec/v1\n", file.read_bytes()[:5000]):
        file.write_bytes(broken)
        assert refused(path)
    file.unlink()
    with pytest.raises(StartError, match=r"names pytorch_model-00002-of-00002\.bin, which is missing$"):
        weights.convert_weights(path)


def test_no_weights(tmp_path: Path) -> None:
    for name in ("training_args.bin", "optimizer.bin", "scheduler.bin", "model.txt"):
        (tmp_path / name).write_bytes(b"x")
    assert weights.convert_weights(tmp_path) == f"{tmp_path} has no .bin weights: nothing to do"
    for name in ("a", "b"):
        (tmp_path / f"{name}.bin.index.json").write_text("{}")
    assert "has 2 indexes of .bin weights" in weights.convert_weights(tmp_path)


# For serving: the model's directory, often a read-only volume, stays as it is.


def test_converted_once_until_the_weights_change(
    model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = model("encoder-decoder", 2), tmp_path / "cache"
    caplog.set_level("INFO")
    save_file({"w": torch.ones(1)}, path / "adapter_model.safetensors")  # not the weights
    before = sorted(path.iterdir())
    first = weights.ensure_weights(path, cache)
    assert f"{path} has no safetensors: serving those made of its .bin files, in {first}" in caplog.messages
    assert same(loaded(first, safetensors=True), loaded(path, safetensors=False))
    assert sorted(path.iterdir()) == before
    with monkeypatch.context() as patch:
        patch.setattr(staging, "run_child", lambda *_args, **_options: "must not run")
        (path / "config.json").rename(path / "old.json")  # others of the model's files may change
        shutil.copy(path / "old.json", path / "config.json")
        assert weights.ensure_weights(path, cache) == first
        assert (first / "config.json").samefile(path / "config.json")
    file = path / "pytorch_model-00001-of-00002.bin"
    torch.save({name: value + 1 for name, value in torch.load(file, weights_only=True).items()}, file)
    second = weights.ensure_weights(path, cache)
    assert same(loaded(second, safetensors=True), loaded(path, safetensors=False))
    weights.convert_weights(path)
    assert weights.ensure_weights(path, cache) == path


def test_engines_that_have_weights_of_their_own(model: Callable[..., Path], tmp_path: Path) -> None:
    path = model("tied")
    shutil.copy(make_fake_model(tmp_path / "fake") / "tokenizer.json", path)

    def served(engine: str) -> Path:
        environ = {"MODEL_NAME": str(path), "DEPLOYMENT_FRAMEWORK": engine, "CACHE_DIR": str(tmp_path / "cache")}
        preparation = prepare(parse([], environ, "tgis serve")).with_safetensors()
        return Path(preparation.engine_options().model_path)

    assert served("fake") == path
    assert served("hf_optimum_ort") != path  # hf_transformers will serve it
    (path / "onnx").mkdir()
    (path / "onnx" / "model.onnx").touch()
    assert served("hf_optimum_ort") == path
    assert served("hf_transformers") != path


def test_an_unwritable_cache_is_named(model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(StartError, match=r"cannot keep converted weights for .*/cache"):
        weights.ensure_weights(model("tied"), tmp_path / "cache")
