"""Models whose attention does not go through transformers' AttentionInterface."""

import random
from itertools import product
from pathlib import Path

import pytest
import torch
from batches import engine_options
from cpu_kernels import CPU_ISA, kernels_of
from slow_cases import slow_except
from tiny_models import OWN_ATTENTION, VOCAB_SIZE, logits_of_chunks, make_model, make_model_from_config, paged_engine
from transformers import AutoModelForCausalLM

from tgis.engines.paged import attention_hooks
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import Unsupported

CHUNKS = 150, 249, 1, 1
FAST = [
    ("MPT", "auto"),
    ("Falcon RW", "none"),
    ("GPT-Neo", "auto"),
    ("CodeGen", "none"),
]  # BLOOM: test_recorded_steps.py


@pytest.mark.parametrize(("name", "kernels"), slow_except(FAST, product(OWN_ATTENTION, ("auto", "none"))))
def test_logprobs_far_from_the_start_are_those_of_transformers(
    name: str, kernels: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where biases are large and rounded, and beyond a window, which the short prompt at load does not reach."""
    if kernels == "auto":
        kernels_of(CPU_ISA)  # or the test is skipped
    draw = random.Random(1)
    tokens = [draw.randrange(3, VOCAB_SIZE) for _ in range(sum(CHUNKS))]
    model = make_model_from_config(OWN_ATTENTION[name], tmp_path)
    engine = paged_engine(model, max_sequence_length=len(tokens), cpu_isa=CPU_ISA if kernels == "auto" else "none")
    assert engine.runner.attention.runs_cpu_kernel == (kernels == "auto")
    logits = logits_of_chunks(engine, tokens, CHUNKS)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
    assert "failure" not in caplog.text  # of recorded steps


def test_a_hook_that_does_not_fit_the_model_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change in transformers; test_self_check.py has hooks that give something else."""
    options = engine_options(make_model("Bloom", tmp_path))
    monkeypatch.setattr(attention_hooks, "_alibi", lambda *_: None)
    with pytest.raises(Unsupported, match=r"^tgis_native cannot run it: AttributeError"):
        PagedEngine(options)
