"""Captured decode steps: what is captured is replayed as it is, here without a device that could capture it."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from batches import engine_options
from fake_cuda_graphs import record
from tiny_models import make_model, paged_engine
from torch import Tensor

from tgis.engines.kernels.attention_inputs import PrefillChunk
from tgis.engines.lora.soft_prompts import PromptSpan
from tgis.engines.memory import capacity
from tgis.engines.paged.attention_metadata import AttentionMetadata
from tgis.engines.paged.batch import FlatBatch, StaticInputs
from tgis.engines.paged.cuda_graphs import Capture, DecodeGraphs, Replay, cuda_capture
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import Unsupported
from tgis.prompts.tensor_file import may_wait

ROWS, WIDTH, SCRATCH = 37, 6, 999


def batch_of(rows: int, draw: random.Random, logits_indices: list[int] | None = None) -> FlatBatch:
    """Random numbers of all kinds."""

    def some(*shape: int) -> Tensor:
        return torch.tensor([draw.randint(1, 90) for _ in range(torch.Size(shape).numel())]).view(shape)

    width = draw.randint(1, WIDTH)
    indices = list(range(rows)) if logits_indices is None else logits_indices
    lengths = some(rows).clamp(max=width)
    attention = AttentionMetadata(some(rows), some(rows, width), lengths, [])
    return FlatBatch(some(rows), some(rows), attention, torch.tensor(indices), [])


def forward(batch: FlatBatch) -> Tensor:
    """Something that depends on every number of each row, and on nothing of other rows."""
    attention = batch.attention
    seen = torch.arange(attention.block_tables.shape[1]) < attention.seq_lens[:, None]
    row = (
        batch.input_ids
        + 3 * batch.positions
        + 7 * attention.slot_mapping
        + 11 * attention.seq_lens
        + (attention.block_tables * seen).sum(1)
    )
    return torch.stack([row, row * row], 1)[batch.logits_indices].double()


@pytest.fixture(scope="module")
def graphs() -> DecodeGraphs:
    return graphs_of(forward, ROWS, WIDTH)


def graphs_of(
    run: Callable[[FlatBatch], Tensor], rows: int, max_blocks: int, capture: Capture = record
) -> DecodeGraphs:
    return DecodeGraphs(run, StaticInputs(rows, max_blocks, torch.device("cpu")), SCRATCH, capture)


def test_any_number_of_rows_in_any_order_of_sizes(graphs: DecodeGraphs) -> None:
    """The logits are in the order in which the batch wants them."""
    draw = random.Random(1)
    for _ in range(60):
        rows = draw.randint(1, ROWS)
        batch = batch_of(rows, draw, logits_indices=draw.sample(range(rows), rows))
        found = graphs.run(batch)
        assert found is not None
        assert torch.equal(found, forward(batch))


def test_long_prompts_are_not_replayed(graphs: DecodeGraphs) -> None:
    """Each of their tokens would read all of the context by itself."""
    for context, replayed in ((1 << 14, True), (1 << 15, False)):
        batch = batch_of(3, random.Random(1))
        attention = batch.attention
        attention.block_tables, attention.seq_lens = attention.block_tables[:0], attention.seq_lens[:0]
        attention.chunks.append(PrefillChunk(slice(0, 3), context, torch.tensor([1])))
        assert (graphs.run(batch) is not None) == replayed


def test_other_batches_are_not_replayed(graphs: DecodeGraphs) -> None:
    draw = random.Random(5)
    assert graphs.run(batch_of(ROWS + 1, draw)) is None
    with_soft_prompt = batch_of(3, draw)
    with_soft_prompt.spans.append(PromptSpan(0, 0, torch.zeros(1, 4)))
    assert graphs.run(with_soft_prompt) is None


def test_a_step_that_synchronizes_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails leaves torch 2.11's allocator in a bad state (pytorch issue 180395)."""
    modes = ["default"]

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "error":  # as torch does, once
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(torch.cuda, "graph", None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run() -> Tensor:
        if modes[-1] == "error":
            assert may_wait.locked()  # threads that load adapters may wait only later
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    with pytest.raises(Unsupported, match="synchronizing"):
        graphs_of(lambda _: run(), 4, WIDTH, cuda_capture())
    assert modes == ["default", "error", "default"]
    assert not may_wait.locked()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    model = make_model("Llama", tmp_path_factory.mktemp("model"))
    return paged_engine(model, 8, dtype="float64")


def test_captured_steps_must_agree_with_eager_ones(engine: PagedEngine, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        output = run().clone()
        return lambda: None, output  # nothing is computed

    engine.runner.graphs = None
    eager_logits = engine.runner.dummy_logits()
    engine.runner.capture_graphs(record, eager_logits, engine.info)
    assert engine.runner.graphs is not None
    assert not caplog.records
    engine.runner.capture_graphs(wrong, eager_logits, engine.info)
    assert engine.runner.graphs is None
    assert "decode steps run without CUDA graphs: captured steps do not give the logits of eager ones" in caplog.text


def test_only_a_device_that_still_works_runs_without_graphs(
    engine: PagedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    eager_logits = engine.runner.dummy_logits()
    refused = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing\nand more")
    engine.runner.capture_graphs(mock.Mock(side_effect=refused), eager_logits, engine.info)
    assert engine.runner.graphs is None
    assert "run without CUDA graphs: CUDA error: operation not permitted when stream is capturing" in caplog.text
    for fatal in (torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError("CUDA error: unknown error")):
        with pytest.raises(type(fatal)):
            engine.runner.capture_graphs(mock.Mock(side_effect=fatal), eager_logits, engine.info)


@pytest.mark.parametrize(("free", "used"), [(5000, 4992), (4992, 4992), (1023, 1023)])
def test_compiled_graphs_of_the_last_start_are_for_the_same_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, used: int
) -> None:
    monkeypatch.setattr(capacity, "memory_for_batches", lambda *_: 100 * free + 7)
    monkeypatch.setattr(capacity, "rank_memory", lambda *_: 100 * free + 7)
    options = engine_options(tmp_path, 4, max_sequence_length=1 << 20)
    assert capacity.KVBudget(options, torch.device("cuda"), 4, 16).num_blocks(100, lambda: 0) == used
