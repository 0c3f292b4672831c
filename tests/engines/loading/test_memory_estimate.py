"""What a check tells of memory without weights; test_memory_limit.py fills it."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batches import engine_options
from mlp_speculators import random_mlp, save_mlp
from tiny_models import DECODER_START, LLAMA_LIKE, T5_LIKE, make_model, make_model_from_config
from transformers import LlamaConfig, Qwen2Config, T5Config

from tgis.engines import describe_memory, load_shard
from tgis.engines.loading import memory_estimate
from tgis.engines.loading.memory_estimate import UnloadedModel
from tgis.engines.memory import available
from tgis.engines.memory.available import total_memory
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.utils.logs import format_bytes

UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
LONGEST, ROWS = 128, 16
SETTINGS: dict[str, Any] = {"engine": "auto", "max_sequence_length": LONGEST, "estimate_memory": "auto"}
LLAMA = LlamaConfig(vocab_size=8000, **LLAMA_LIKE | {"hidden_size": 128, "num_hidden_layers": 4})
GROUPED = Qwen2Config(vocab_size=12_000, **LLAMA_LIKE | {"hidden_size": 512, "intermediate_size": 2048})
T5 = T5Config(vocab_size=8000, decoder_start_token_id=DECODER_START, **T5_LIKE | {"d_model": 128, "d_kv": 32})


def bytes_in(text: str) -> float:
    number, unit = text.split()[:2]
    return float(number) * UNITS[unit]


def options_for(model: Path, **changes: Any) -> EngineOptions:
    return engine_options(model, ROWS, **SETTINGS | changes)


MLP = {"model_type": "mlp_speculator", "vocab_size": 12_000, "emb_dim": 256, "inner_dim": 256, "n_predict": 1}


@pytest.mark.parametrize(
    ("free", "changes", "refusal"),
    [
        (1 << 16, {}, r"is too big: loading its .* NUM_SHARD devices$"),
        (1 << 20, {}, r"^no memory is left for a KV cache"),
        (1 << 24, {"kv_cache_bytes": 1 << 25, "max_sequence_length": 1 << 20}, r"^no memory is left for a KV cache"),
        (1 << 28, {"max_sequence_length": 1 << 20}, r"^MAX_SEQUENCE_LENGTH 1048576 does not fit into memory, \d+ does"),
        (1 << 20, {"engine": "hf_transformers"}, r"BATCH_SAFETY_MARGIN taken off.*; lower MAX_BATCH_SIZE"),
        (1 << 30, {"num_shards": 3}, r"^NUM_SHARD=3 does not divide"),
    ],
)
def test_a_check_refuses_what_a_start_would(
    free: int, changes: dict[str, Any], refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (available, memory_estimate):
        monkeypatch.setattr(module, "available_memory", lambda _: free)
    with pytest.raises(StartError, match=refusal):
        describe_memory(options_for(make_model("Llama", tmp_path), **changes))


@pytest.mark.parametrize(
    ("config", "drafter", "share", "refusal"),
    [
        (LLAMA, LLAMA, 1.9, r"^no memory is left for a KV cache of .*, 0 bytes are free: lower"),
        (LLAMA, GROUPED, 1.1, r"drafter is too big: loading its .* NUM_SHARD devices$"),
        (GROUPED, MLP, 9, r"drafter is for hidden states of 256, and the model has 512$"),
        (T5, LLAMA, 9, r"drafter: SPECULATOR_NAME is for decoder-only models, which T5\w+ is not$"),
    ],
)
def test_what_drafts_must_go_together_with_the_model(
    config: Any, drafter: Any, share: float, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so many times the memory that the weights of the model take."""
    paths = tmp_path / "model", tmp_path / "drafter"
    for path in paths:
        path.mkdir()
    make_model_from_config(config, paths[0])
    save_mlp(paths[1], MLP, random_mlp(MLP)) if drafter is MLP else make_model_from_config(drafter, paths[1])
    options = options_for(paths[0], speculator_path=str(paths[1]))
    free = int(share * (paths[0] / "model.safetensors").stat().st_size)
    for module in (available, memory_estimate):
        monkeypatch.setattr(module, "available_memory", lambda _: free)
    assert len(describe_memory(msgspec.structs.replace(options, speculation="off", kv_cache_bytes=1 << 19))) == 5
    with pytest.raises(StartError, match=refusal):
        describe_memory(msgspec.structs.replace(options, speculation="auto"))


@pytest.mark.parametrize("config", [LLAMA, T5], ids=["llama", "t5"])
@pytest.mark.parametrize(
    ("engine", "mode", "longest"), [("tgis_native", "auto", 1 << 14), ("hf_transformers", "off", 256)]
)
def test_a_start_on_a_cpu_takes_the_estimate_of_a_check(
    engine: str, mode: str, longest: int, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded engines measure what a check estimates, unless that is off."""
    changes = {"max_sequence_length": longest, "dtype": "float32", "engine": engine, "estimate_memory": mode}
    options = options_for(make_model_from_config(config, tmp_path), **changes)
    weights, free = UnloadedModel(options).weights, 1 << 27
    assert weights == pytest.approx((tmp_path / "model.safetensors").stat().st_size, rel=0.05)
    for module in (available, memory_estimate):
        monkeypatch.setattr(module, "available_memory", lambda _: free)
    lines = describe_memory(options)
    assert [re.sub(r" *[\d.]+ (bytes|[KMG]iB|tokens)", "N", line) for line in lines] == [
        f"{engine} on cpu needs:",
        "N  weights, as loaded",
        "N  KV cache, full:N ofN",
        "N  the largest step beside it, estimated",
        "N  together;N ofN are free, room forN",
    ]
    assert f"of {format_bytes(total_memory(torch.device('cpu')))} are free" in lines[-1]
    room = int(lines[-1].split("room for ")[1].split()[0])
    monkeypatch.setattr(available, "available_memory", lambda _: free - weights)  # they are loaded by then
    started = load_shard(options)[0]
    started.warm_up()
    ends = 15 * (config.is_encoder_decoder and not started.info.padded)  # two parts end within a block
    assert started.info.token_capacity == room + ends
    assert f"full: {ROWS * longest} tokens of" in lines[2] or not started.info.padded
    assert sum(map(bytes_in, lines[1:-1])) == pytest.approx(bytes_in(lines[-1]), rel=0.005)


def test_codes_of_8_bits_nearly_double_the_tokens(tmp_path: Path) -> None:
    model = make_model_from_config(LlamaConfig(**dict(LLAMA.to_dict(), head_dim=64)), tmp_path)
    changes = {"dtype": "bfloat16", "kv_cache_bytes": 1 << 20, "max_sequence_length": 64}
    lines = (describe_memory(options_for(model, kv_cache_dtype=each, **changes))[2] for each in ("auto", "int8"))
    auto, coded = (int(line.split("full: ")[1].split()[0]) for line in lines)
    assert 1.8 * auto <= coded < 1.95 * auto  # with their scales


@pytest.mark.parametrize("engine", ["tgis_native", "hf_transformers"])
def test_ranks_share_weights_and_kv_cache(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the memory of a machine: with the step, which each of them takes, there is room for fewer tokens."""
    for module in (available, memory_estimate):
        monkeypatch.setattr(module, "available_memory", lambda _: 1 << 26)
    model = make_model("Llama", tmp_path)
    one, two = (describe_memory(options_for(model, engine=engine, num_shards=ranks)) for ranks in (1, 2))
    assert two[0] == f"{engine} on cpu needs, each of 2 ranks:"
    assert [bytes_in(line) for line in two[1:3]] == pytest.approx([bytes_in(line) / 2 for line in one[1:3]], rel=0.01)
    rooms = [int(lines[-1].split("room for ")[1].split()[0]) for lines in (one, two)]
    assert 0.5 * rooms[0] < rooms[1] <= rooms[0]


WHOLE = (8 << 20) + 4096 * 128 * 5 * 4  # hidden states of an input


@pytest.mark.parametrize(
    ("config", "engine", "needed"),
    [
        (LLAMA, "tgis_native", 3 * 512 * 8000 * 4),  # logprobs of a pass
        (LLAMA, "hf_transformers", 3 * 128 * 8000 * 4),
        (T5, "tgis_native", WHOLE + 8000 * 96),
        (T5, "hf_transformers", WHOLE + 4096**2 * 4 * 2 * 4 + 512 * 8000 * 4),  # biases, logits
    ],
)
def test_the_largest_step_of_one_long_sequence(config: Any, engine: str, needed: int, tmp_path: Path) -> None:
    model = make_model_from_config(config, tmp_path)
    lines = describe_memory(engine_options(model, 1, engine=engine, max_sequence_length=4096))
    assert bytes_in(lines[3]) == pytest.approx(needed, rel=0.01)


@pytest.mark.parametrize(
    ("name", "wanted", "engine"),
    [
        ("JetMoe", "auto", "tgis_native"),
        ("T5Gemma", "auto", "tgis_native"),
        ("Llama", "hf_optimum_ort", "hf_optimum_ort"),
    ],
)
def test_what_only_a_start_can_tell_is_said(name: str, wanted: str, engine: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    for file in (model / "model.onnx", model / "onnx/other.onnx_data"):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(2048))
    (line,) = describe_memory(options_for(model, engine=wanted))
    size = "4 KiB" if engine == "hf_optimum_ort" else r"\S+ KiB"
    assert re.fullmatch(rf"{engine} has {size} of weights in files; .* is known only at a start\.", line)


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "Gemma2", "M2M100", "Falcon", "LongT5"])
def test_the_kv_cache_of_many_architectures_is_known(name: str, tmp_path: Path) -> None:
    lines = describe_memory(options_for(make_model(name, tmp_path)))
    assert (len(lines), lines[0].split()[0]) == (5, "hf_transformers" if name == "LongT5" else "tgis_native")
