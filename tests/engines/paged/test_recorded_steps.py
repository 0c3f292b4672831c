"""Recorded steps give the tokens of eager ones."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from batches import engine_options
from cpu_kernels import CPU_ISA, kernels_of
from slow_cases import slow_except
from tiny_models import (
    EXPERTS,
    OWN_ATTENTION,
    generate_all,
    greedy_requests,
    limits_of,
    make_model_from_config,
    make_wide_config,
    paged_engine,
)
from torch import Tensor

from tgis.engines.kernels.cpu import linear
from tgis.engines.kernels.cpu.gemm import OneDnnGemm
from tgis.engines.kernels.cpu.recorder_memory import RecorderMemory
from tgis.engines.kernels.cpu.recording import Recorder
from tgis.engines.kernels.cpu.replay import RecordedPass, ResizablePass
from tgis.engines.paged import recorded_steps
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.recorded_steps import RecordedSteps
from tgis.errors import Unsupported

ROWS = 4
FAST = {"Llama", "Gemma2", "OPT", "T5", "Marian", "BLOOM", "GPT-J"}
REPLAYED = ["Llama", "Mistral", "Gemma", "Gemma2", "Qwen2", "Qwen3", "Phi", "Phi3", "Granite", "StableLm", "GPTNeoX"]
REPLAYED += ["OPT", "OPT, galactica", "OPT, 350m", "GPT2", "GPTBigCode", "GPTBigCode, many heads", "Starcoder2"]
REPLAYED += ["Nemotron", "Persimmon", "BioGpt", "Arcee", "BitNet"]
REPLAYED += ["T5", "T5, flan", "UMT5", "Bart", "Marian", "M2M100", "Pegasus", "Blenderbot", "T5Gemma"]


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many steps are recorded and replayed."""
    kernels_of(CPU_ISA)
    counts: Counter[str] = Counter()
    record = Recorder.record

    def counted(recorder: Recorder, run: Callable[[], Tensor]) -> tuple[RecordedPass, Tensor]:
        replay, output = record(recorder, run)
        counts["recorded"] += 1

        def count() -> None:
            counts["replayed"] += 1

        replay.parts.append(count)
        return replay, output

    monkeypatch.setattr(Recorder, "record", counted)
    replay_sizes = ResizablePass.__call__

    def counted_prefill(replay: ResizablePass, sizes: tuple[int, ...]) -> None:
        counts["prefills"] += 1
        replay_sizes(replay, sizes)

    monkeypatch.setattr(ResizablePass, "__call__", counted_prefill)
    return counts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_from_config(make_wide_config("Llama"), tmp_path_factory.mktemp("model"))


def generated(model: Path, **options: Any) -> list[list[int]]:
    """The tokens of a dozen requests that come at random times, some to an idle engine."""
    engine = PagedEngine(engine_options(model, ROWS, **options))
    draw = random.Random(1)
    bounds = limits_of(engine, 25, prefill_tokens=16)
    return generate_all(engine, bounds, greedy_requests(12, 9, draw, longest=40), draw)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return generated(model)


def assert_replayed_like_eager(
    model: Path, replays: Counter[str], monkeypatch: pytest.MonkeyPatch, *, prefills: bool | None, **options: Any
) -> None:
    found = generated(model, **options)
    assert 1 < replays["recorded"] <= ROWS  # once for each number of decodes
    assert replays["replayed"] > 10
    assert prefills in (None, replays["prefills"] > 10)
    replays.clear()
    monkeypatch.setattr(RecordedSteps, "run", lambda *_: None)
    assert generated(model, **options) == found
    assert not replays


def test_replayed_steps_give_the_tokens_of_eager_ones(
    model: Path, replays: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_replayed_like_eager(model, replays, monkeypatch, prefills=True)


@pytest.mark.parametrize("name", slow_except(FAST, OWN_ATTENTION))
def test_models_with_attention_of_their_own_are_replayed(
    name: str, tmp_path: Path, replays: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_from_config(OWN_ATTENTION[name], tmp_path)
    assert_replayed_like_eager(model, replays, monkeypatch, prefills=name not in ("GPT-J", "CodeGen", "MPT"))


def test_decodes_of_experts_are_replayed(
    tmp_path: Path, replays: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are not: routers need operators of PyTorch."""
    model = make_model_from_config(EXPERTS["Qwen3Moe"], tmp_path)
    assert_replayed_like_eager(model, replays, monkeypatch, prefills=False)


@pytest.mark.parametrize(("onednn", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_layers_that_our_gemm_cannot_multiply_are_replayed(
    model: Path, replays: Counter[str], monkeypatch: pytest.MonkeyPatch, *, onednn: bool, dtype: str
) -> None:
    """Such as odd sizes in bfloat16: oneDNN multiplies, or PyTorch where the CPU has AVX2 alone."""
    monkeypatch.setattr(linear, "our_gemms", lambda _weight, _kernels, _dtype: {})
    if not onednn:
        monkeypatch.setattr(OneDnnGemm, "supports", lambda _: False)
    assert_replayed_like_eager(model, replays, monkeypatch, prefills=False, dtype=dtype)


@pytest.mark.parametrize("name", slow_except(FAST, REPLAYED))
def test_replayed_steps_call_no_operators_of_pytorch(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "tgis"):
        paged_engine(make_model_from_config(make_wide_config(name), tmp_path), ROWS, dtype="bfloat16")
    assert "operators of PyTorch in a recorded pass: none" in caplog.messages


def test_a_recorded_step_that_gives_other_logits_is_not_used(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one would that depends on numbers on the host."""
    monkeypatch.setattr(Recorder, "record", lambda _, run: (lambda: None, run().clone()))
    monkeypatch.setattr(ResizablePass, "__call__", lambda *_: None)
    assert generated(model) == expected
    for what in ("decode steps", "steps with prompts"):
        assert caplog.text.count(f"{what} are not recorded: a recorded step does not give the logits") == 1


def test_a_model_that_cannot_be_recorded_runs_eagerly(
    model: Path, expected: list[list[int]], replays: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(RecorderMemory, "empty", mock.Mock(side_effect=Unsupported("aten.item looks at numbers")))
    assert generated(model) == expected
    assert [text for text in caplog.messages if "recorded" in text] == [
        f"{kind} are not recorded: aten.item looks at numbers" for kind in ("steps with prompts", "decode steps")
    ]
    assert not replays


def test_after_a_lack_of_memory_steps_are_recorded_again(
    model: Path, expected: list[list[int]], replays: Counter[str], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(recorded_steps, "_PAUSE", 5)
    empty, fails = RecorderMemory.empty, iter([True, True] + [False] * 60 + [True])

    def scarce(memory: RecorderMemory, like: Tensor) -> Tensor:
        if next(fails, False):
            raise MemoryError
        return empty(memory, like)

    monkeypatch.setattr(RecorderMemory, "empty", scarce)
    assert generated(model) == expected
    assert not [*fails]  # it has failed three times
    for kind in ("steps with prompts", "decode steps"):
        assert caplog.text.count(f"{kind} are recorded again 5 steps after each failure: MemoryError()") == 1
    assert replays["replayed"] > 10
    assert replays["prefills"] > 10


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"cpu_isa": "none"}])
def test_without_kernels_nothing_is_recorded(model: Path, replays: Counter[str], options: dict[str, str]) -> None:
    generated(model, **options)
    assert not replays
