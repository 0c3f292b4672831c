"""On a real GPU: compiled and captured steps of all ways to attend give the logits of transformers on the CPU."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import engine_options, limits
from quantized_formats import FORMATS, quantized_copy
from tiny_models import (
    LONG,
    OWN_ATTENTION,
    VOCAB_SIZE,
    WIDE_ENCODER_DECODERS,
    check_greedy,
    generate_all,
    greedy_requests,
    logits_of_chunks,
    make_model_from_config,
    make_wide_config,
    paged_engine,
    tgis_warnings,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from tgis.engines.paged.engine import PagedEngine
from tgis.engines.quantization.weight import quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # of libraries: versions differ on GPU machines
]
CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama": make_wide_config("Llama", **LONG),
    "Gemma2": make_wide_config("Gemma2", **LONG, sliding_window=40),
    "GPT2": make_wide_config("GPT2", n_positions=512),
    "GptOss": make_wide_config("GptOss", **LONG, sliding_window=40, num_experts_per_tok=2),
    **OWN_ATTENTION,
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # relative, in the Euclidean norm
WAITS_FOR_THE_HOST = ("GptOss", "float32")  # transformers multiplies by experts one after the other
CASES = [case for case in product(CONFIGS, TOLERANCE) if case != WAITS_FOR_THE_HOST]
QUANTIZED = [
    *product(["int8", "int4", "gptq, act-order", "awq", "fp8"], TOLERANCE),
    ("compressed-tensors, int8", "bfloat16"),
]
CHUNKS = 150, 249, *[1] * 6


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_logits_are_those_of_transformers(
    name: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(1)
    tokens = [draw.randrange(3, VOCAB_SIZE) for _ in range(sum(CHUNKS))]
    model = make_model_from_config(CONFIGS[name], tmp_path)
    how: dict[str, Any] = {"dtype": dtype, "num_threads": 2, "compile": name in ("Llama", "BLOOM")}
    engine = paged_engine(model, max_sequence_length=len(tokens), **how)
    assert tgis_warnings(caplog) == []  # nothing runs eagerly
    found = logits_of_chunks(engine, tokens, CHUNKS)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).float().eval()
    expected = reference(torch.tensor([tokens])).logits[0]
    assert (found - expected).norm() / expected.norm() < TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "dtype"), QUANTIZED)
def test_quantized_weights_give_the_logits_of_what_they_stand_for(
    name: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled and captured, with merged layers; activations stay as they are, but for those of compressed-tensors."""
    draw = random.Random(1)
    tokens = [draw.randrange(3, VOCAB_SIZE) for _ in range(sum(CHUNKS))]
    model = make_model_from_config(CONFIGS["Llama"], tmp_path)
    how: dict[str, Any] = {"dtype": dtype, "num_threads": 2, "compile": True}
    if name in FORMATS:
        config, codes = FORMATS[name]
        reference = quantized_copy(model, codes, config)
    else:
        how |= {"quantize": name, "quantize_activations": "none"}
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        for path, module in reference.named_modules():
            if isinstance(module, nn.Linear) and path != "lm_head":
                module.weight.data = quantize(module.weight.data, int(name[-1])).dequantized()
    engine = paged_engine(model, max_sequence_length=len(tokens), **how)
    assert tgis_warnings(caplog) == []
    found, expected = logits_of_chunks(engine, tokens, CHUNKS), reference(torch.tensor([tokens])).logits[0]
    assert (found - expected).norm() / expected.norm() < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["T5, flan", "Marian"])
def test_encoder_decoders_generate_what_transformers_does(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Inputs that come at random steps, with few blocks."""
    model, draw = make_model_from_config(WIDE_ENCODER_DECODERS[name], tmp_path), random.Random(1)
    engine = PagedEngine(engine_options(model, 6, num_threads=2))
    bounds = limits(
        160, padded=False, block_size=16, prefix_cache=True, max_batch_size=6, prefill_tokens=64, encoder_decoder=True
    )
    requests = greedy_requests(12, 12, draw)
    generated = generate_all(engine, bounds, requests, draw)
    reference = AutoModelForSeq2SeqLM.from_pretrained(model, dtype=torch.float32).eval()
    for request, tokens in zip(requests, generated, strict=True):
        check_greedy(reference, request.tokens, tokens)
    assert tgis_warnings(caplog) == []
