"""On a real GPU: no step waits for the device before its tokens, whoever joins and leaves and whatever is asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from batches import engine_options
from random_requests import KINDS, WISHES
from tiny_models import make_model

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.paged.engine import BLOCK_SIZE, PagedEngine
from tgis.ipc.request import Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Whatever makes torch wait for a stream raises; to wait for an event is allowed."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("ahead", [True, False])
def test_nothing_waits_but_for_tokens(tmp_path: Path, ahead: bool) -> None:
    """Prompts, decodes, and rows that end one after the other; twice, since the first time kernels are compiled."""
    engine = PagedEngine(engine_options(make_model("Llama", tmp_path), 16, threads=1), async_decode=ahead)
    engine.warm_up()
    for seed in range(2):
        rows = []
        for number, sampling in enumerate(KINDS):
            details = WISHES[number % len(WISHES)]
            request = Request(100 * seed + number, [3 + number] * (5 + number), 4 + number, False, sampling, details)
            rows.append(Sequence(request, 0.0))
            rows[-1].block_table = list(range(number * 2, number * 2 + 2))
            assert len(request.tokens) + request.max_new_tokens <= 2 * BLOCK_SIZE
        while rows:
            plan = StepPlan.compute_all(rows)
            if seed:
                with waiting_forbidden():
                    result = engine.step(plan)
            else:
                result = engine.step(plan)
            for row, count, tokens in zip(rows, plan.num_scheduled_tokens, result.tokens, strict=True):
                row.num_computed_tokens += count
                row.tokens += tokens
            engine.release([row for row in rows if not row.num_remaining_tokens])
            rows = [row for row in rows if row.num_remaining_tokens]
