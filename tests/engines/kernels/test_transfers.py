"""Numbers to the device and back; that nobody waits for them shows on a GPU only: test_async_decode_gpu.py."""

import numpy as np
import torch

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.kernels.transfers import Download, to_device, upload
from tgis.engines.paged.batch import prepare_inputs
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

CPU = torch.device("cpu")


def test_parts_of_one_copy() -> None:
    parts = [[1, 2, 3], [], [-(2**63), 2**63 - 1], range(4)]
    uploaded = upload(parts, CPU)
    assert [part.tolist() for part in uploaded] == [list(part) for part in parts]
    assert {part.dtype for part in uploaded} == {torch.int64}
    assert len({part.untyped_storage().data_ptr() for part in uploaded}) == 1
    assert {(part.data_ptr() - uploaded[0].data_ptr()) % 16 for part in uploaded} == {0}


def test_there_and_back() -> None:
    there = to_device([0.1, -0.0, float("inf")], torch.float64, CPU)
    assert Download(there).wait() == [0.1, -0.0, float("inf")]
    assert Download(torch.empty(0)).wait() == []


def test_a_batch_is_one_copy() -> None:
    """Whatever is in it, the floats that travel with it bit by bit."""
    rows = [Sequence(Request(n, list(range(20)), 9, False, SamplingParams(), LogprobOptions()), 0.0) for n in range(3)]
    for row, blocks, computed in zip(rows, ([7, 1, 4], [3, 9], [2, 5]), (19, 0, 12), strict=True):
        row.block_table, row.num_computed_tokens = blocks, computed
    numbers = np.array([[0.1, 2.0**-53, 5e-324], [np.inf, -0.0, 1e300]])
    batch, _ = prepare_inputs(StepPlan(rows, [1, 3, 2], rows[:1], has_prefill=True), 8, CPU, numbers)
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
    assert batch.step_metadata.numpy().tobytes() == numbers.tobytes()
    tensors = [
        batch.input_ids,
        batch.positions,
        batch.slot_mapping,
        batch.block_tables,
        batch.seq_lens,
        batch.logits_indices,
        batch.step_metadata,
    ]
    tensors += [chunk.block_table for chunk in batch.chunks]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
