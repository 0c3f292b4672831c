"""The model inputs of a step."""

import random

import numpy as np
import torch

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.paged.batch import BatchBuilder, _BlockTables
from tgis.ipc.request import Request

CPU = torch.device("cpu")


def test_a_batch_is_one_copy() -> None:
    """Everything in it; the floats among it bit by bit."""
    rows = [Sequence(Request(n, list(range(20)), 9), 0.0) for n in range(3)]
    for row, blocks, computed in zip(rows, ([7, 1, 4], [3, 9], [2, 5]), (19, 0, 12), strict=True):
        row.block_table, row.num_computed_tokens = blocks, computed
    numbers = np.array([[1, 2, 3], [-1, 2**63 - 1, -(2**63)]])
    plan = StepPlan(rows, [1, 3, 2], rows[:1], has_prefill=True)
    batch, _ = BatchBuilder(8, CPU, LoraLayers(None)).build(plan, numbers)
    assert batch.input_ids.tolist() == [19, 0, 1, 2, 12, 13]
    assert batch.positions.tolist() == [19, 0, 1, 2, 12, 13]
    assert batch.slot_mapping.tolist() == [4 * 8 + 3, 24, 25, 26, 5 * 8 + 4, 5 * 8 + 5]
    assert batch.block_tables.tolist() == [[7, 1, 4]]
    assert batch.seq_lens.tolist() == [20]
    assert batch.logits_indices.tolist() == [0]
    assert [(chunk.tokens, chunk.num_computed_tokens, chunk.block_table.tolist()) for chunk in batch.chunks] == [
        (slice(1, 4), 0, [3]),
        (slice(4, 6), 12, [2, 5]),
    ]
    assert batch.step_metadata.tolist() == numbers.tolist()
    tensors = [each for each in vars(batch).values() if isinstance(each, torch.Tensor)]
    assert len(tensors) == 7
    tensors += [chunk.block_table for chunk in batch.chunks]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_rows_of_block_tables_follow_their_sequences() -> None:
    """Which grow, come and go, lose their blocks and get others, in any order."""
    draw, rows = random.Random(1), _BlockTables()
    tables: list[list[int]] = []
    for step in range(400):
        for _ in range(draw.randint(0, 2) or not tables):
            tables.insert(draw.randint(0, len(tables)), [draw.randrange(1000) for _ in range(draw.randint(1, 9))])
        for table in tables:
            table += [1 + draw.randrange(1000) for _ in range(draw.randint(-6, 2))]
        if draw.random() < 0.2:
            tables[draw.randrange(len(tables))] = [step]
        while len(tables) > draw.randint(4, 12):
            tables.pop(draw.randrange(len(tables)))
        width = draw.randint(1, max(map(len, tables)))
        found = rows.rows(tables, width)
        assert found.shape == (len(tables), width)
        for row, table in zip(found.tolist(), tables, strict=True):
            assert row == (table + [0] * width)[:width]
    assert rows.rows([], 0).shape == (0, 0)
