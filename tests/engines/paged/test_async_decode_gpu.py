"""On a real GPU: no step waits for the device except for its tokens, whatever the batch and its requests."""

from pathlib import Path

import pytest
import torch
from grammar_walks import compiled, digits
from random_requests import KINDS, WISHES
from tiny_models import VOCAB_SIZE, make_model, paged_engine, tgis_warnings

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.paged.cuda_graphs import forbid_synchronization
from tgis.engines.paged.engine import BLOCK_SIZE
from tgis.ipc.lookups import GrammarKind
from tgis.ipc.request import Request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
]


@pytest.mark.parametrize("async_decode", [True, False])
def test_steps_wait_for_their_tokens_only(tmp_path: Path, async_decode: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts, decodes, grammars, and sequences that end one after the other; twice: the first run compiles kernels."""
    engine = paged_engine(make_model("Llama", tmp_path), 16, async_decode=async_decode)
    for seed in range(2):
        rows = []
        for number, sampling in enumerate(KINDS):
            details = WISHES[number % len(WISHES)]
            prompt, grammar = [3 + number] * (5 + number), 1 if number % 4 == 1 else None
            request = Request(100 * seed + number, prompt, 4 + number, False, sampling, details, grammar=grammar)
            rows.append(Sequence(request, 0.0))
            rows[-1].block_table = list(range(number * 3, number * 3 + 3))
            if request.grammar:
                rows[-1].grammar = compiled(GrammarKind.REGEX, "[0-9]{40}", digits(VOCAB_SIZE))
            assert len(request.tokens) + request.max_new_tokens <= 3 * BLOCK_SIZE
        while rows:
            plan = StepPlan.compute_all(rows)
            if seed:
                with forbid_synchronization():
                    result = engine.step(plan)
            else:
                result = engine.step(plan)
            for row, count, tokens in zip(rows, plan.num_scheduled_tokens, result.tokens, strict=True):
                row.num_computed_tokens += count
                row.tokens += tokens
            engine.release([row for row in rows if not row.num_remaining_tokens])
            rows = [row for row in rows if row.num_remaining_tokens]
    assert tgis_warnings(caplog) == []  # nothing runs eagerly
