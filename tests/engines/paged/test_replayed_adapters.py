"""LoRA adapters in decode steps that are replayed: the tokens of eager ones, whatever adapters come and go."""

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_batches import AdapterRequest, EngineSetup, generate_all
from cpu_kernels import CPU_ISA, kernels_of
from fake_cuda_graphs import record
from tiny_models import (
    EOS,
    VOCAB_SIZE,
    Outcome,
    limits_of,
    make_model_from_config,
    make_wide_config,
    outcomes,
    paged_engine,
)
from torch import Tensor

from tgis.batcher.sequence import StepPlan
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.paged import model_runner
from tgis.engines.paged.cuda_graphs import Replay
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.self_check import dummy_sequence
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.ipc.request import LogprobOptions
from tgis.prompts.lora import LoraAdapter, LoraLayerWeights

ROWS, NEW = 4, 9  # ROWS of `paged_engine`
Tokens = Callable[..., list[list[int]]]  # by ranks of adapters


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_from_config(make_wide_config("Llama"), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def eager(model: Path) -> Tokens:
    """Of eager steps in float64."""
    return cache(lambda *ranks: generated(paged_engine(model, dtype="float64"), [*ranks]))


def make_adapters(engine: PagedEngine, ranks: list[int]) -> list[LoraAdapter]:
    """Random ones; every other changes every other layer."""
    torch.manual_seed(1)
    dtype = getattr(torch, engine.info.dtype)
    adapters = []
    for version, rank in enumerate(ranks, 1):
        targets = list(engine.info.lora_targets.items())[:: 1 + version % 2]
        adapters.append(
            LoraAdapter(
                version,
                {
                    name: LoraLayerWeights(torch.randn(rank, i, dtype=dtype), torch.randn(rank, o, dtype=dtype) / 9)
                    for name, (i, o) in targets
                },
            )
        )
    return adapters


def generated(engine: PagedEngine, ranks: list[int]) -> list[list[int]]:
    """By requests with each adapter and none, which arrive at random steps; first some, then all."""
    adapters: list[Any] = [None, *make_adapters(engine, ranks)]
    draw = random.Random(2)
    bounds = limits_of(engine, 25, prefill_tokens=16)
    setup, tokens = EngineSetup(engine, bounds), []
    for some in (adapters[:2], adapters):
        prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 30))] for _ in range(3 * len(some))]
        jobs = [AdapterRequest(prompt, some[n % len(some)], NEW) for n, prompt in enumerate(prompts)]
        tokens += generate_all(setup, jobs, seed=3, eos=EOS)[0]
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_adapters_change_no_bit(model: Path, dtype: str) -> None:
    """Ranks are odd and even, and adapters alone have other places than beside others."""
    kernels_of(CPU_ISA)
    engine = paged_engine(model, dtype=dtype, cpu_isa=CPU_ISA)
    adapters: list[Any] = [*make_adapters(engine, [33, 40, 21, 7]), None]
    setup, draw = EngineSetup(engine, limits_of(engine, 25, prefill_tokens=16)), random.Random(4)
    details = LogprobOptions(generated_tokens=True, logprobs=True)

    def answers(jobs: list[AdapterRequest]) -> list[Outcome]:
        requests = {next(setup.ids): job for job in jobs}
        loaded = {number: job.prompt for number, job in requests.items()}
        rows = [job.request(number) for number, job in requests.items()]
        return [*outcomes(engine, setup.bounds, rows, random.Random(3), loaded, eos=EOS)[0].values()]

    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 30))] for _ in range(10)]
    jobs = [AdapterRequest(prompt, adapters[n % 5], NEW, details) for n, prompt in enumerate(prompts)]
    for job, answer in zip(jobs, answers(jobs), strict=True):
        engine.runner.lora.clear()
        assert answers([job]) == [answer]


@pytest.fixture
def captured(model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PagedEngine, Counter[str]]:
    """An engine whose bank has four columns at least, and how many steps with adapters are captured and replayed."""
    monkeypatch.setitem(model_runner._MIN_LORA_COLUMNS, "cpu", 4)
    return capture(paged_engine(model, dtype="float64"))


def capture(engine: PagedEngine) -> tuple[PagedEngine, Counter[str]]:
    counts = Counter[str]()

    def counted(run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        replay, output = record(run)
        batch = engine.runner.attention.batch
        if batch is None or batch.adapters is None:
            return replay, output
        counts["captured"] += 1

        def count() -> None:
            counts["replayed"] += 1
            replay()

        return count, output

    engine.runner.capture_graphs(counted, engine.runner.dummy_logits(), engine.info)
    assert engine.runner.graphs is not None
    return engine, counts


@pytest.mark.parametrize(("ranks", "grows"), [([2, 1], False), ([2, 3, 5, 1], True)])
def test_captured_steps_read_what_the_bank_holds(
    eager: Tokens, captured: tuple[PagedEngine, Counter[str]], ranks: list[int], grows: bool
) -> None:
    """Later adapters too; as long as it does not grow: one capture for each batch size and set of layers."""
    engine, counts = captured
    assert generated(engine, ranks) == eager(*ranks)
    if grows:
        assert counts["captured"] > 3
    else:
        assert counts["captured"] <= 2 * 3
        assert counts["replayed"] > 5 * counts["captured"]


def test_a_prompt_captures_nothing(captured: tuple[PagedEngine, Counter[str]]) -> None:
    """All decodes would wait for it, at each size once."""
    engine, counts = captured
    seqs = [dummy_sequence([5, 6, 7], 16) for _ in range(3)]
    for seq in seqs:
        (seq.adapter,) = make_adapters(engine, [2])
    engine.runner.compute_logits(StepPlan(seqs[:1], [3], seqs[:1], has_prefill=True))
    assert counts == {}
    for seq in seqs:
        seq.num_computed_tokens = 2
    engine.runner.compute_logits(StepPlan(seqs, [1, 1, 1], seqs, has_prefill=False))
    seqs[0].num_computed_tokens = 0
    engine.runner.compute_logits(StepPlan(seqs[:1], [3], seqs[:1], has_prefill=True))
    assert counts["captured"] == 1
    assert counts["replayed"] >= 2


def test_adapters_that_cannot_be_captured_run_eagerly(
    eager: Tokens,
    captured: tuple[PagedEngine, Counter[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = captured
    assert engine.runner.graphs is not None

    def fail(_: object) -> None:
        raise RuntimeError("called a synchronizing operation\nand more")

    monkeypatch.setattr(engine.runner.graphs, "_capture_graph", fail)
    assert generated(engine, [2, 3]) == eager(2, 3)
    assert [each for each in caplog.messages if "CUDA graphs" in each] == [
        "decode steps with LoRA adapters run without CUDA graphs: called a synchronizing operation"
    ]


COMPILED: dict[str, Any] = {"compile": True, "adapter_store": AdapterStoreOptions("/nowhere", 1 << 30, 100)}


def test_captured_steps_of_layers_for_a_compiler(model: Path, eager: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled calls operators in place of changing outputs; here nothing compiles it."""
    monkeypatch.setitem(model_runner._MIN_LORA_COLUMNS, "cpu", 4)
    ranks = [2, 3, 5, 1]
    expected = eager(*ranks)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    change, changed = LoraLayers.changed_output, set[int]()

    def counted(self: LoraLayers, layer: int, *arguments: Any) -> Tensor:
        changed.add(layer)
        return change(self, layer, *arguments)

    monkeypatch.setattr(LoraLayers, "changed_output", counted)
    engine, counts = capture(paged_engine(model, dtype="float64", **COMPILED))
    assert generated(engine, ranks) == expected
    assert counts["replayed"] > 5 * counts["captured"] > 0
    assert changed == set(range(len(engine.info.lora_targets)))
    assert engine.runner.compiled is not None


def test_layers_are_not_compiled_if_adapters_in_them_differ(
    model: Path, eager: Tokens, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, change = eager(2, 3), LoraLayers.changed_output

    def wrong(self: LoraLayers, *arguments: Any) -> Tensor:
        return change(self, *arguments) * 1.1

    monkeypatch.setattr(LoraLayers, "changed_output", wrong)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    engine = paged_engine(model, dtype="float64", **COMPILED)
    assert "PT2_COMPILE has no effect: compiled steps do not give the logits of eager" in caplog.text
    assert generated(engine, [2, 3]) == expected
