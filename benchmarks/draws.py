"""`python -m benchmarks.draws`: the cost of a draw, and how many sampled texts depend on the rest of the batch.

Every text is generated alone, and again in batches that others join and leave. The models have random weights, a large
vocabulary and flat tails: the most sensitive case for rounding errors that depend on the batch. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    MarianConfig,
    PreTrainedConfig,
)

from benchmarks.engines import engine_options, load_warm_engine
from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.engines.base import Engine
from tgis.engines.kernels.cpu.library import load_kernels
from tgis.engines.sampling import draws
from tgis.engines.sampling.draws import Draw, select_ops
from tgis.engines.sampling.logits_processors import Scores
from tgis.ipc.request import Request, SamplingParams

VOCAB_SIZE, WIDTH, SPREAD = 32_000, 256, 3.0  # tokens, hidden size, standard deviation of the logits
BESIDE = 16  # sequences of a batch
COST_ROWS, COST_VOCAB_SIZE, REPEATS = (1, 8, 64), 49_152, 30
TOKEN_IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(
        **TOKEN_IDS,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    ),
    "Marian": MarianConfig(
        **TOKEN_IDS,
        decoder_start_token_id=3,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_position_embeddings=2048,
    ),
}
Case = tuple[str, str, str]  # model, engine, dtype
CASES: list[Case] = [
    (family, engine, dtype)
    for family, engine in (
        ("Llama", "tgis_native"),
        ("Llama", "hf_transformers"),
        ("Marian", "hf_transformers"),
        ("Marian", "tgis_native"),
    )
    for dtype in ("float32", "bfloat16")
]
SAMPLING = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=200),
    SamplingParams(temperature=1.0, top_k=1000, top_p=0.95, typical_p=0.9),
)

Texts = list[list[int]]


def make_model(config: PreTrainedConfig, directory: Path) -> Path:
    """Save a model with random weights, scaled so that activations keep their magnitude."""
    torch.manual_seed(0)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    model.get_output_embeddings().weight.data.mul_(SPREAD)
    model.save_pretrained(directory)
    return directory


def make_requests(count: int) -> list[Request]:
    """Requests of 4 to 40 tokens in and 8 to 24 out, each with its own seed."""
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(4, 40))] for _ in range(count)]
    params = [msgspec.structs.replace(SAMPLING[number % len(SAMPLING)], seed=number) for number in range(count)]
    return [
        Request(number, prompt, rng.randint(8, 24), sampling_params=own)
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True))
    ]


def generate(engine: Engine, limits: BatchLimits, requests: list[Request], at_once: int) -> Texts:
    """The tokens of each request, with at most `at_once` of them running."""
    batcher, waiting, texts = Batcher(limits, eos_ids=[]), requests[::-1], dict[int, list[int]]()
    while len(texts) < len(requests):
        while waiting and len(requests) - len(waiting) - len(texts) < at_once:
            batcher.submit([waiting.pop()], 0.0)
        plan = batcher.plan(0.0)
        engine.release(plan.to_release)
        batcher.commit(plan, engine.step(plan).tokens, 0.0)
        texts |= {seq.id: seq.tokens[seq.prompt_length :] for seq in plan.sampled if seq.finished}
    engine.release(batcher.plan(0.0).to_release)
    return [texts[request.id] for request in requests]


def count_changed(left: Texts, right: Texts) -> int:
    return sum(one != other for one, other in zip(left, right, strict=True))


def measure_texts(cases: list[Case], count: int, cache: Path) -> list[dict[str, Any]]:
    """How many texts change in a batch, and between the engines, for each model, engine and dtype."""
    requests, rows = make_requests(count), []
    alone: dict[tuple[str, str], Texts] = {}  # by model and dtype
    with tempfile.TemporaryDirectory() as directory:
        models = {name: make_model(config, Path(directory, name)) for name, config in CONFIGS.items()}
        for family, name, dtype in cases:
            engine, limits = load_warm_engine(engine_options(name, models[family], dtype, BESIDE, cache))
            own = generate(engine, limits, requests, 1)
            other_engine = alone.setdefault((family, dtype), own)
            row = {
                "model": family,
                "engine": name,
                "dtype": dtype,
                "texts": count,
                "tokens": sum(map(len, own)),
                "changed_beside_others": count_changed(own, generate(engine, limits, requests, BESIDE)),
                "changed_from_the_other_engine": count_changed(own, other_engine),
            }
            print(row, flush=True)
            rows.append(row)
    return rows


def measure_cost(cache: Path) -> dict[str, dict[int, float]]:
    """Milliseconds of a draw from SmolLM2's whole vocabulary, by number of rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = load_kernels("auto", str(cache)) if device.type == "cpu" else None
    ways = {"PyTorch": draws.draw, f"kernel ({kernels.isa if kernels else device})": select_ops(device, kernels).draw}
    values = torch.randn(max(COST_ROWS), COST_VOCAB_SIZE, device=device).bfloat16()
    found = {}
    for name, draw in ways.items():
        found[name] = {rows: _milliseconds(draw, values[:rows]) for rows in COST_ROWS}
        print(name, *(f"{rows} rows: {taken} ms" for rows, taken in found[name].items()), flush=True)
    return found


def _milliseconds(draw: Draw, values: torch.Tensor) -> float:
    """The median time of a draw."""
    temperature = torch.ones(len(values), 1, dtype=torch.float64, device=values.device)
    scores = Scores(values, values.amax(-1, keepdim=True).float(), temperature)
    keys = torch.arange(len(values), device=values.device)[:, None]
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        draw(scores, keys).cpu()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1000, 3)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draws", description=__doc__)
    parser.add_argument("--texts", type=int, default=1000, metavar="N", help="texts of each model; 0 skips them")
    parser.add_argument("--models", default=",".join(CONFIGS), metavar="NAME,...")
    parser.add_argument("--dtypes", default="float32,bfloat16", metavar="NAME,...")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    models, dtypes = args.models.split(","), args.dtypes.split(",")
    cases = [case for case in CASES if args.texts and case[0] in models and case[2] in dtypes]
    report = {"cost_ms": measure_cost(args.cache), "texts": measure_texts(cases, args.texts, args.cache)}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
