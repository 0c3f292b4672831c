"""With our CPU kernels a row gets the same numbers to the last bit whatever is beside it and however its prompt is cut.

Where oneDNN multiplies, sums may depend on the number of rows.
"""

import random
from typing import Any

import msgspec
import pytest
from batches import engine_options, limits
from cpu_kernels import CPU_ISA, kernels_of
from tiny_models import (
    OWN_ATTENTION,
    SHAPE_OF_512,
    VOCAB_SIZE,
    WIDE_ENCODER_DECODERS,
    make_model_from_config,
    run_steps,
)
from transformers import Gemma2Config, GPT2Config, GPTNeoXConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from tgis.engines.kernels.cpu.library import cpu_flags, resolve_isa
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, TokenLogprobs

CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**SHAPE_OF_512),
    "Qwen3": Qwen3Config(**SHAPE_OF_512),
    "Gemma2": Gemma2Config(**SHAPE_OF_512, sliding_window=40),
    "GPT2": GPT2Config(**SHAPE_OF_512),
    "GPTNeoX": GPTNeoXConfig(**SHAPE_OF_512),
    **OWN_ATTENTION,
    **WIDE_ENCODER_DECODERS,
}
LENGTHS = (1, 2, 15, 16, 17, 40, 131, 200)
NEW, ROWS = 12, 8

Outcome = tuple[list[int], list[TokenLogprobs]]

CASES: list[Any] = [("Llama", "bfloat16", "auto"), ("Gemma2", "float32", "auto"), ("GPT2", "bfloat16", "auto")]
CASES += [("BLOOM", "bfloat16", "auto"), ("MPT", "float32", "auto"), ("Falcon RW", "float32", "auto")]
CASES += [("T5", "bfloat16", "auto"), ("Marian", "float32", "auto")]
CASES += [
    pytest.param((name, dtype, "auto"), marks=pytest.mark.slow)
    for name in CONFIGS
    for dtype in ("bfloat16", "float32")
    if (name, dtype, "auto") not in CASES
]
CASES += [("Llama", "bfloat16", "avx2"), ("Llama", "float32", "avx2")]
QUANTIZED: dict[str, Any] = {
    "int8": {"quantize": "int8", "quantize_logits": True},
    "int4": {"quantize": "int4"},
    "int4, plain activations": {"quantize": "int4", "quantize_activations": "none"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
}
CASES += [("Llama", "bfloat16", "auto", kind) for kind in QUANTIZED] + [("GPT2", "float32", "avx2", "int8")]
CASES += [("Gemma2", "float32", "auto", "KV int8"), ("T5", "bfloat16", "auto", "KV int8")]
CASES += [("Marian", "float32", "auto", "KV fp8"), ("Llama", "float32", "avx2", "KV fp8")]


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    name, dtype, isa, *kind = request.param
    if isa == resolve_isa("auto", cpu_flags()):
        pytest.skip(f"{isa} is the best of this CPU, which the other cases use")
    isa = CPU_ISA if isa == "auto" else isa
    kernels_of(isa)
    path = make_model_from_config(CONFIGS[name], tmp_path_factory.mktemp("model"))
    options = msgspec.structs.replace(engine_options(path, ROWS, threads=2), dtype=dtype, cpu_isa=isa)
    options = msgspec.structs.replace(options, **QUANTIZED[kind[0]] if kind else {})
    engine = PagedEngine(options)
    engine.warm_up()
    return engine


def requests() -> list[Request]:
    draw = random.Random(1)
    details = LogprobOptions(generated_tokens=True, logprobs=True, ranks=True, top_n_tokens=3)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    prompts[-2][:40] = prompts[-1][:40] = prompts[5]  # shared prefixes
    sampling = [
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5),
        SamplingParams(repetition_penalty=1.3),
    ]
    return [Request(number, prompt, NEW, False, sampling[number % 3], details) for number, prompt in enumerate(prompts)]


def outcomes(
    engine: PagedEngine, together: list[Request], chunk: int, blocks: int, rng: random.Random
) -> list[Outcome]:
    """What each request gets when they come at random times; `chunk` prompt tokens at the most in a step."""
    bounds = limits(
        blocks * 16,
        prefix_cache=not engine.info.encoder_decoder,
        padded=False,
        block_size=16,
        prefill_tokens=chunk,
        max_batch_size=ROWS,
        encoder_decoder=engine.info.encoder_decoder,
    )
    found: dict[int, Outcome] = {request.id: ([], []) for request in together}
    for plan, result, _ in run_steps(engine, bounds, together, rng):
        for row, tokens, facts in zip(plan.sampled, result.tokens, result.logprobs, strict=True):
            assert len(facts) == len(tokens)
            found[row.id][0].extend(tokens)
            found[row.id][1].extend(facts)
    return [found[request.id] for request in together]


def test_neighbours_and_chunks_change_nothing(engine: PagedEngine) -> None:
    draw = random.Random(2)
    asked = requests()
    alone = [outcomes(engine, [request], 512, 100, draw)[0] for request in asked]
    for chunk in (3, 16, 50):
        draw.shuffle(asked)
        together = outcomes(engine, asked, chunk, draw.choice([24, 100]), draw)
        for request, outcome in zip(asked, together, strict=True):
            assert outcome == alone[request.id], (chunk, request.id)
