"""Models whose attention does not go through transformers' AttentionInterface."""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from batches import engine_options
from cpu_kernels import CPU_ISA, kernels_of
from tiny_models import OWN_ATTENTION, VOCAB_SIZE, make_model, make_model_from_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from tgis.batcher.sequence import StepPlan
from tgis.engines.paged import attention_hooks
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.self_check import dummy_sequence
from tgis.errors import Unsupported

CHUNKS = 150, 249, 1, 1


@pytest.mark.parametrize("kernels", ["auto", "none"])
@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_logprobs_far_from_the_start_are_those_of_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    """Where biases are large and rounded, and beyond a window, which the short prompt at load does not reach."""
    if kernels == "auto":
        kernels_of(CPU_ISA)  # or the test is skipped
    draw = random.Random(1)
    tokens = [draw.randrange(3, VOCAB_SIZE) for _ in range(sum(CHUNKS))]
    options = engine_options(make_model_from_config(OWN_ATTENTION[name], tmp_path), 4, threads=1)
    isa = options.cpu_isa if kernels == "auto" else kernels
    engine = PagedEngine(msgspec.structs.replace(options, max_sequence_length=len(tokens), cpu_isa=isa))
    engine.warm_up()
    assert engine.runner.attention.runs_cpu_kernel == (kernels == "auto")
    seq, logits = dummy_sequence(tokens, 16, prompt_logprobs=True), []
    for count in CHUNKS:
        computed, slices = engine.runner.compute_logits(StepPlan([seq], [count], [], has_prefill=True))
        logits.append(computed[slices[seq.id]].clone())
        seq.num_computed_tokens += count
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(torch.cat(logits).log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)


ALIBI = attention_hooks._alibi


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("alibi", "message"),
    [
        (lambda *arguments: 1.2 * ALIBI(*arguments), "own attention in layer 0 "),
        (lambda *_: None, "^the hooks do not fit the attention of BloomForCausalLM: AttributeError"),
    ],
)
def test_a_hook_that_does_not_fit_the_model_is_not_used(
    alibi: Callable[..., Tensor | None], message: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a change in transformers."""
    options = engine_options(make_model("Bloom", tmp_path), 4, threads=1)
    monkeypatch.setattr(attention_hooks, "_alibi", alibi)
    with pytest.raises(Unsupported, match=message):
        PagedEngine(msgspec.structs.replace(options, dtype=dtype))
