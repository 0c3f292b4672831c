"""Recorded decode steps: what is recorded is run again as it stands, here without a device that could record it."""

import random

import pytest
import torch
from recording import record
from torch import Tensor

from tgis.engines.paged.batch import Chunk, FlatBatch
from tgis.engines.paged.cuda_graphs import DecodeGraphs, graph_sizes, recorder

ROWS, WIDTH, SCRATCH = 37, 6, 999


def batch_of(rows: int, draw: random.Random, kept: list[int] | None = None) -> FlatBatch:
    """Random numbers of all kinds."""

    def some(*shape: int) -> Tensor:
        return torch.tensor([draw.randint(1, 90) for _ in range(torch.Size(shape).numel())]).view(shape)

    width = draw.randint(1, WIDTH)
    kept = list(range(rows)) if kept is None else kept
    lengths = some(rows).clamp(max=width)
    return FlatBatch(some(rows), some(rows), some(rows), some(rows, width), lengths, [], torch.tensor(kept), [])


def forward(batch: FlatBatch) -> Tensor:
    """Something that depends on every number of each row, and on nothing of other rows."""
    seen = torch.arange(batch.tables.shape[1]) < batch.lengths[:, None]
    row = batch.ids + 3 * batch.positions + 7 * batch.slots + 11 * batch.lengths + (batch.tables * seen).sum(1)
    return torch.stack([row, row * row], 1)[batch.kept].double()


@pytest.fixture(scope="module")
def graphs() -> DecodeGraphs:
    made = DecodeGraphs(forward, ROWS, WIDTH, SCRATCH)
    made.record(record, torch.device("cpu"))
    return made


def test_any_number_of_rows_in_any_order_of_sizes(graphs: DecodeGraphs) -> None:
    draw = random.Random(1)
    for _ in range(60):
        batch = batch_of(draw.randint(1, ROWS), draw)
        found = graphs.logits(batch)
        assert found is not None
        assert torch.equal(found, forward(batch))


def test_a_later_step_leaves_the_logits_of_an_earlier_one_alone(graphs: DecodeGraphs) -> None:
    """Of both nothing may have been read yet."""
    draw = random.Random(3)
    batches = [batch_of(rows, draw) for rows in (4, 4, 3)]
    found = [graphs.logits(batch) for batch in batches]
    for logits, batch in zip(found, batches, strict=True):
        assert logits is not None
        assert torch.equal(logits, forward(batch))


def test_the_order_of_logits_is_that_of_the_batch(graphs: DecodeGraphs) -> None:
    batch = batch_of(4, random.Random(2), kept=[2, 0, 3, 1])
    found = graphs.logits(batch)
    assert found is not None
    assert torch.equal(found[:, 0], forward(batch_with_all(batch))[[2, 0, 3, 1], 0])


def batch_with_all(batch: FlatBatch) -> FlatBatch:
    kept = torch.arange(batch.singles)
    return FlatBatch(batch.ids, batch.positions, batch.slots, batch.tables, batch.lengths, [], kept, [])


def test_rows_that_are_missing_read_nothing_and_write_to_the_scratch_slot() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def spy(batch: FlatBatch) -> Tensor:
        seen.append((batch.lengths.tolist(), batch.slots.tolist()))
        return forward(batch)

    made = DecodeGraphs(spy, 8, WIDTH, SCRATCH)
    made.record(record, torch.device("cpu"))
    made.logits(batch_of(8, random.Random(3)))
    made.logits(batch_of(5, random.Random(4)))
    lengths, slots = seen[-1]
    assert len(lengths) == 8
    assert lengths[5:] == [0, 0, 0]
    assert slots[5:] == [SCRATCH] * 3
    assert all(lengths[:5])


def test_other_batches_are_not_for_graphs(graphs: DecodeGraphs) -> None:
    draw = random.Random(5)
    assert graphs.logits(batch_of(ROWS + 1, draw)) is None
    assert graphs.logits(batch_of(3, draw, kept=[0, 2])) is None
    chunked = batch_of(3, draw)
    chunked.chunks.append(Chunk(slice(3, 9), 0, torch.tensor([1])))
    assert graphs.logits(chunked) is None
    assert DecodeGraphs(forward, ROWS, WIDTH, SCRATCH).logits(batch_of(3, draw)) is None


def test_what_waits_for_the_device_is_not_begun_to_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that fails leaves torch 2.11's allocator in the middle of it (pytorch issue 180395)."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "graph", None)

    def run() -> Tensor:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    made = DecodeGraphs(lambda _: run(), 4, WIDTH, SCRATCH)
    with pytest.raises(RuntimeError, match="synchronizing"):
        made.record(recorder(), torch.device("cpu"))
    assert modes == ["default", "error", "default"]
    assert made.logits(batch_of(3, random.Random(6))) is None


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 63, 64, 65, 256])
def test_sizes(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    waste = max(later - earlier for earlier, later in zip([0, *sizes], sizes, strict=False))
    assert waste <= 16
