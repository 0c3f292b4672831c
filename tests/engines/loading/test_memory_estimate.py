"""What a check tells of memory without weights, compared with what starts of the same models measure."""

import ctypes
import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from batches import engine_options
from forked_processes import forked
from mlp_speculators import random_mlp, save_mlp
from tiny_models import DECODER_START, LLAMA_LIKE, T5_LIKE, make_model, make_model_from_config
from transformers import FalconConfig, LlamaConfig, Qwen2Config, T5Config

from tgis.batcher.sequence import StepPlan
from tgis.engines import describe_memory, load_engine
from tgis.engines.loading import memory_estimate
from tgis.engines.loading.memory_estimate import UnloadedModel
from tgis.engines.memory import available
from tgis.engines.memory.profiler import DummyRunner, profile
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import StartError
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.utils.memory import trim_heap

CPU = torch.device("cpu")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
LONGEST, ROWS = 128, 16
M_MMAP_THRESHOLD = -3  # of mallopt
KEPT = 13 << 20  # bytes that estimates for encoder-decoders add, for what the C library keeps
SETTINGS: dict[str, Any] = {"engine": "auto", "max_sequence_length": LONGEST, "estimate_memory": "auto"}
LLAMA = LlamaConfig(vocab_size=8000, **LLAMA_LIKE | {"hidden_size": 128, "num_hidden_layers": 4})
GROUPED = Qwen2Config(vocab_size=12_000, **LLAMA_LIKE | {"hidden_size": 512, "intermediate_size": 2048})
T5 = T5Config(vocab_size=8000, decoder_start_token_id=DECODER_START, **T5_LIKE | {"d_model": 128, "d_kv": 32})
FALCON = FalconConfig(
    vocab_size=8000,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_kv_heads=2,
    new_decoder_architecture=True,
)


def bytes_in(text: str) -> float:
    number, unit = text.split()[:2]
    return float(number) * UNITS[unit]


def options_for(model: Path, **changes: Any) -> EngineOptions:
    return engine_options(model, ROWS, **SETTINGS | changes)


MLP = {"model_type": "mlp_speculator", "vocab_size": 12_000, "emb_dim": 512, "inner_dim": 256, "n_predict": 1}
DRAFTER = LlamaConfig(vocab_size=12_000, **LLAMA_LIKE | {"hidden_size": 256, "num_hidden_layers": 3})
STARTS: dict[str, tuple[Any, str, Any]] = {  # a model, KV_CACHE_DTYPE, and what drafts
    "llama": (LLAMA, "auto", None),
    "qwen2": (GROUPED, "auto", None),
    "falcon": (FALCON, "auto", None),
    "t5": (T5, "auto", None),
    "qwen2, KV int8": (GROUPED, "int8", DRAFTER),
    "qwen2, a draft model": (GROUPED, "auto", DRAFTER),
    "qwen2, an MLP speculator": (GROUPED, "auto", MLP),
}


def make_drafter(config: Any, path: Path) -> str | None:
    """The directory of a model, or of an MLP speculator."""
    if isinstance(config, dict):
        save_mlp(path, config, random_mlp(config))
    elif config:
        make_model_from_config(config, path)
    return str(path) if config else None


def start(options: EngineOptions) -> tuple[list[str], str, EngineInfo]:
    """The lines of a check, and the log and the info of a start."""
    # What steps free, the C library keeps or not, as the heap happens to look: larger blocks get mappings of their own.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
    log = io.StringIO()
    logging.basicConfig(level=logging.INFO, stream=log, format="%(message)s")
    warm_info(msgspec.structs.replace(options, max_batch_size=1, max_sequence_length=8))  # libraries are read once
    trim_heap()
    log.truncate(0)
    lines = describe_memory(options)
    measured = mock.patch.object(PagedEngine, "_step_bytes", lambda engine: profile(engine, options, CPU))  # as on GPUs
    encodes = json.loads((Path(options.model_path) / "config.json").read_bytes()).get("is_encoder_decoder")
    find_peak = peak_of_inputs if encodes else PagedEngine.find_peak
    with measured, mock.patch.object(PagedEngine, "find_peak", find_peak):
        info = warm_info(options)
    return lines, log.getvalue(), info


def peak_of_inputs(engine: PagedEngine, runner: DummyRunner) -> int:
    """As `find_peak`, of the longest input of an encoder-decoder beside short ones."""
    seqs = [runner._sequence(25 if n else LONGEST, index=n, logprobs=False) for n in range(ROWS)]
    for seq in seqs:
        seq.block_table = [block % engine.caches[0].num_blocks for block in range(-(-len(seq.tokens) // 16) + 1)]
    peak = runner._peak(StepPlan.compute_all(seqs))
    engine.release(seqs)
    return peak


def warm_info(options: EngineOptions) -> EngineInfo:
    engine, _ = load_engine(options, sys.exit, print)
    engine.warm_up()
    engine.close()
    return engine.info


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_a_check_tells_what_a_start_measures(name: str, tmp_path: Path) -> None:
    config, kv_cache_dtype, drafter = STARTS[name]
    (tmp_path / "drafter").mkdir()
    changes = {"kv_cache_dtype": kv_cache_dtype, "speculator_path": make_drafter(drafter, tmp_path / "drafter")}
    options = options_for(make_model_from_config(config, tmp_path / "model"), speculation="auto", **changes)
    (title, weights, *drafting, kv_cache, step, together), text, info = forked(start, options)
    measured = bytes_in(re.findall(r"measured in .*: (.*) beside", text)[0])
    if info.padded:
        ((reserved, each),) = re.findall(r"rows take (.*), and each token of context (.*): room", text)
        kv_bytes = bytes_in(reserved) - measured + bytes_in(each) * ROWS * LONGEST
    else:
        ((blocks, each),) = re.findall(r"KV cache: (\d+) blocks of 16 tokens, (.*) a token", text)
        kv_bytes = int(blocks) * 16 * bytes_in(each)
        assert f"KV cache, full: {info.token_capacity} tokens" in kv_cache
        assert (f"GiB in all, in {kv_cache_dtype}" in text) == (kv_cache_dtype != "auto")
    assert title.startswith(f"{info.engine} on cpu")
    files = [path.stat().st_size for path in sorted(tmp_path.glob("*/*.safetensors"), reverse=True)]  # the model first
    assert [bytes_in(line) for line in (weights, *drafting)] == pytest.approx(files, rel=0.05)
    assert [info.drafted_tokens > 0, len(drafting)] == [drafter is not None] * 2
    assert bytes_in(kv_cache) == pytest.approx(kv_bytes, rel=0.05)
    kept = KEPT if info.encoder_decoder else 0
    assert 0.95 * measured < bytes_in(step) < 1.05 * measured + kept
    assert bytes_in(together) == pytest.approx(sum(map(bytes_in, (weights, *drafting, kv_cache, step))), rel=0.005)


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
        (GROUPED, MLP | {"emb_dim": 256}, 9, r"drafter is for hidden states of 256, and the model has 512$"),
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
    options = options_for(make_model_from_config(config, paths[0]), speculator_path=make_drafter(drafter, paths[1]))
    free = int(share * (paths[0] / "model.safetensors").stat().st_size)
    for module in (available, memory_estimate):
        monkeypatch.setattr(module, "available_memory", lambda _: free)
    assert len(describe_memory(msgspec.structs.replace(options, speculation="off", kv_cache_bytes=1 << 19))) == 5
    with pytest.raises(StartError, match=refusal):
        describe_memory(msgspec.structs.replace(options, speculation="auto"))


@pytest.mark.parametrize("config", [LLAMA, T5], ids=["llama", "t5"])
def test_a_start_on_a_cpu_takes_the_estimate_of_a_check(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_for(make_model_from_config(config, tmp_path), max_sequence_length=1 << 14, dtype="float32")
    weights, free = UnloadedModel(options).weights, 1 << 27
    assert weights == pytest.approx((tmp_path / "model.safetensors").stat().st_size, rel=0.05)
    for module in (available, memory_estimate):
        monkeypatch.setattr(module, "available_memory", lambda _: free)
    lines = describe_memory(options)
    room = int(lines[-1].split("room for ")[1].split()[0])
    monkeypatch.setattr(available, "available_memory", lambda _: free - weights)  # they are loaded by then
    engine = PagedEngine(options)
    engine.warm_up()
    assert engine.info.token_capacity == room + 15 * config.is_encoder_decoder  # two parts end within a block
    assert sum(map(bytes_in, lines[1:-1])) == pytest.approx(bytes_in(lines[-1]), rel=0.005)


def test_codes_of_8_bits_nearly_double_the_tokens(tmp_path: Path) -> None:
    model = make_model_from_config(LlamaConfig(**dict(LLAMA.to_dict(), head_dim=64)), tmp_path)
    changes = {"dtype": "bfloat16", "kv_cache_bytes": 1 << 20, "max_sequence_length": 64}
    lines = (describe_memory(options_for(model, kv_cache_dtype=each, **changes))[2] for each in ("auto", "int8"))
    auto, coded = (int(line.split("full: ")[1].split()[0]) for line in lines)
    assert coded >= 1.8 * auto


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
    (model / "model.onnx").write_bytes(bytes(2048))
    (line,) = describe_memory(options_for(model, engine=wanted))
    assert re.fullmatch(rf"{engine} has \S+ KiB of weights in files; .* is known only at a start\.", line)


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "Gemma2", "M2M100", "Falcon"])
def test_the_kv_cache_of_many_architectures_is_known(name: str, tmp_path: Path) -> None:
    assert len(describe_memory(options_for(make_model(name, tmp_path)))) == 5
