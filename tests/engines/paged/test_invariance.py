"""With our CPU kernels a row gets the same numbers to the last bit whatever is beside it and however its prompt is cut.

Where oneDNN multiplies, sums may depend on the number of rows.
"""

import random
import re
from typing import Any

import msgspec
import pytest
from cpu_kernels import CPU_ISA, kernels_of
from proposers import Adversary, proposing
from quantized_formats import (
    CHANNELS,
    FORMATS,
    GPTQ,
    TOKENS,
    Quantize,
    compressed_tensors,
    gptq,
    in_bytes,
    quantized_copy,
    with_input_scale,
)
from random_requests import KINDS
from slow_cases import slow_except
from tiny_models import (
    EXPERTS,
    LONG,
    OWN_ATTENTION,
    VOCAB_SIZE,
    WIDE_ENCODER_DECODERS,
    WIDE_RECURRENT,
    Outcome,
    limits_of,
    make_config,
    make_model_from_config,
    make_wide_config,
    outcomes,
    paged_engine,
)
from transformers import PreTrainedConfig

from tgis.engines.kernels.cpu.library import cpu_flags, resolve_isa
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

CONFIGS: dict[str, PreTrainedConfig] = {
    **{name: make_wide_config(name, **LONG) for name in ("Llama", "Qwen3", "GPTNeoX")},
    "Gemma2": make_wide_config("Gemma2", **LONG, sliding_window=40),
    "GPT2": make_wide_config("GPT2", n_positions=512),
    "Llama, odd": make_config("Llama", **LONG, head_dim=20, intermediate_size=49),
    **OWN_ATTENTION,
    **WIDE_ENCODER_DECODERS,
    **EXPERTS,
    **WIDE_RECURRENT,
}
LENGTHS = (1, 2, 15, 16, 17, 40, 131, 200)
NEW, ROWS = 12, 8
DETAILS = LogprobOptions(generated_tokens=True, logprobs=True, ranks=True, top_n_tokens=3)

QUANTIZED: dict[str, Any] = {
    "int8": {"quantize": "int8", "quantize_logits": True},
    "int4": {"quantize": "int4"},
    "int4, plain activations": {"quantize": "int4", "quantize_activations": "none"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "int8 and KV int8": {"quantize": "int8", "quantize_logits": True, "kv_cache_dtype": "int8"},
}
STATIC = TOKENS | {"strategy": "tensor", "dynamic": False}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Quantize]] = {  # one for each arithmetic
    **{name: FORMATS[name] for name in ("gptq, act-order", "gptq, 8 bits, ragged", "awq")},
    "int4 by channel": (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}, gptq(4, None, 0)),
    "int8 in groups": FORMATS["compressed-tensors, 8 bits"],
    "E4M3 in blocks": ({"quant_method": "fp8", "weight_block_size": [64, 32]}, in_bytes(64, 32, "weight_scale_inv")),
    "E4M3 by channel": FORMATS["compressed-tensors, E4M3"],
    "W8A8 by token": (compressed_tensors("int-quantized", CHANNELS, input_activations=TOKENS), with_input_scale),
    "W8A8 static": (compressed_tensors("int-quantized", CHANNELS, input_activations=STATIC), with_input_scale),
}
# kernels/test_quantized.py tries all kernels in milliseconds, and with several threads
FAST = [
    "Llama, bfloat16, auto",
    "Gemma2, float32, auto",
    "T5, bfloat16, auto",
    "Llama, odd, bfloat16, auto",
    "Llama, bfloat16, auto, int8 and KV int8",
    "Qwen3Moe, bfloat16, auto",
    "GptOss, float32, auto, int4",
    "Qwen3Next, bfloat16, auto",
    "GraniteMoeHybrid, H, float32, auto",
]
CASES = [
    *(f"{name}, {dtype}, auto" for name in CONFIGS for dtype in ("bfloat16", "float32")),
    *(f"Llama, bfloat16, auto, {kind}" for kind in (*QUANTIZED, *CHECKPOINTS)),
    *(
        f"{name}, bfloat16, auto, {kind}"
        for name in ("Qwen3Moe", "GptOss")
        for kind in ("int8", "int4, plain activations")
    ),
    *("GptOss, float32, auto, int4", "Qwen3Moe, float32, avx2, int8", "Mixtral, bfloat16, avx2"),
    *("Llama, bfloat16, avx2", "Llama, float32, avx2", "GPT2, float32, avx2, int8", "Llama, float32, auto, awq"),
    *(f"Llama, float32, avx2, {kind}" for kind in ("awq", "E4M3 in blocks", "W8A8 static", "KV int8")),
    *(f"{case}, auto, KV int8" for case in ("Gemma2, float32", "T5, bfloat16", "Marian, float32")),
]


@pytest.fixture(scope="module", params=slow_except(FAST, CASES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    name, dtype, isa, kind = re.split(r", (\w*float\d+), (\w+)(?:, )?", request.param)
    if isa == resolve_isa("auto", cpu_flags()):
        pytest.skip(f"{isa} is the best of this CPU, which the other cases use")
    isa = CPU_ISA if isa == "auto" else isa
    kernels_of(isa)
    path = make_model_from_config(CONFIGS[name], tmp_path_factory.mktemp("model"))
    if kind in CHECKPOINTS:
        config, quantize = CHECKPOINTS[kind]
        quantized_copy(path, quantize, config)
    changes = QUANTIZED.get(kind, {})
    return paged_engine(
        path, ROWS, num_threads=1 if kind else 2, dtype=dtype, cpu_isa=isa, speculation="lookup", **changes
    )


def requests() -> list[Request]:
    draw = random.Random(1)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    prompts[-2][:40] = prompts[-1][:40] = prompts[5]  # shared prefixes
    sampling = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5),
        SamplingParams(repetition_penalty=1.3),
    ]
    return [Request(number, prompt, NEW, False, sampling[number % 3], DETAILS) for number, prompt in enumerate(prompts)]


def generated_by(
    engine: PagedEngine, together: list[Request], chunk: int, blocks: int, rng: random.Random, proposed: int = 0
) -> list[Outcome]:
    """What each request gets when they come at random times; `chunk` prompt tokens at the most in a step."""
    prefix_cache = not engine.info.encoder_decoder
    bounds = limits_of(engine, blocks, prefix_cache=prefix_cache, proposed_tokens=proposed, prefill_tokens=chunk)
    return [*outcomes(engine, bounds, together, rng)[0].values()]


def test_neighbours_and_chunks_change_nothing(engine: PagedEngine) -> None:
    draw = random.Random(2)
    asked = requests()
    alone = [generated_by(engine, [request], 512, 100, draw)[0] for request in asked]
    for chunk in (3, 50):
        draw.shuffle(asked)
        together = generated_by(engine, asked, chunk, draw.choice([24, 100]), draw)
        for request, outcome in zip(asked, together, strict=True):
            assert outcome == alone[request.id], (chunk, request.id)


def test_proposals_change_nothing(engine: PagedEngine) -> None:
    """With every sampling method; proposals are often right."""
    assert not engine.info.state_slots or engine.info.state_slots > 2 * ROWS  # else there is no room for them
    draw = random.Random(3)
    penalty = SamplingParams(watermark=True, logit_bias={5: 3.0}, frequency_penalty=0.5, presence_penalty=-0.2)
    sampling = [*KINDS, penalty, msgspec.structs.replace(penalty, temperature=0.9)]
    motif = [draw.randrange(3, VOCAB_SIZE) for _ in range(9)]
    asked = [
        Request(number, motif * draw.randint(1, 5), 16, False, params, DETAILS)
        for number, params in enumerate(msgspec.structs.replace(each, seed=draw.getrandbits(64)) for each in sampling)
    ]
    expected = generated_by(engine, asked, 512, 100, draw)
    right = [request.tokens + own.tokens for request, own in zip(asked, expected, strict=True)]
    for most, blocks in ((5, 24), (15, 100)):
        with proposing(Adversary, right):
            outputs = generated_by(engine, asked, 512, blocks, draw, most)
        for request, output, right_output in zip(asked, outputs, expected, strict=True):
            assert output == right_output, (most, request)
