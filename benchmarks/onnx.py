"""`python -m benchmarks.onnx`: SmolLM2 as ONNX graphs beside transformers, and how many tokens int8 changes.

Speed: `tgis bench` against one server at a time, in alternating rounds. Agreement: the share of float32's greedy tokens
that a variant ranks first at the same position. The last line is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.serving import running_server
from benchmarks.suite import INPUT_TOKENS, OUTPUT_TOKENS, STREAMS, run_load
from demo.fetch import ensure
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines import load_engine
from tgis.engines.base import Engine
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import LogprobOptions, Request
from tgis.utils.cpus import usable_cores

REQUESTS = {1: 2, 8: 16, 32: 64}
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was",
    "Water boils at",
    "The best way to learn programming is",
    "In 1969, humans first",
    "My favourite recipe begins with",
    "def fibonacci(n):",
    "The president of the company said",
    "To be or not to be",
    "Photosynthesis is the process",
    "The stock market fell because",
    "A good friend is someone",
    "She opened the door and",
    "The theory of relativity",
    "Dear Sir or Madam,",
    "The three primary colours are",
    "import numpy as np",
    "When it rains, the",
    "How do birds find their way",
    "The history of Rome",
)
NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run the model."""

    name: str
    engine: str
    dtype: str
    conversion: tuple[str, ...] | None  # options of tgis convert-to-onnx; None: not converted


REFERENCE = Variant("hf_transformers float32", "hf_transformers", "float32", None)
VARIANTS = (
    Variant("hf_transformers bfloat16", "hf_transformers", "bfloat16", None),
    REFERENCE,
    Variant("hf_optimum_ort float32", "hf_optimum_ort", "float32", ()),
)


def model_directory(variant: Variant, model: Path, cache: Path) -> Path:
    """The model directory to serve; graphs are exported once."""
    if variant.conversion is None:
        return model
    out = cache / "bench-onnx" / "-".join([model.name, *(option.strip("-") for option in variant.conversion)])
    if not out.is_dir():
        command = [sys.executable, "-m", "tgis", "convert-to-onnx", str(model), str(out), *variant.conversion]
        subprocess.run(["env", f"CACHE_DIR={cache}", *command], check=True, stdout=sys.stderr)
    return out


def measure_speed(variant: Variant, model: Path, cache: Path) -> dict[int, dict[str, Any]]:
    """The reports for each number of streams."""
    options = ("--deployment-framework", variant.engine, "--dtype", variant.dtype)
    with running_server(model_directory(variant, model, cache), cache, *options) as server:
        print(f"{variant.name} ready after {server.start_seconds:.1f} s", file=sys.stderr)
        run_load(server.target, 1, 1, INPUT_TOKENS, 16)
        levels = {size: run_load(server.target, size, REQUESTS[size], INPUT_TOKENS, OUTPUT_TOKENS) for size in STREAMS}
    print(*(f"{size}: {level['output_tokens_per_s']:.1f} tokens/s" for size, level in levels.items()), file=sys.stderr)
    return levels


def measure_agreement(model: Path, cache: Path) -> dict[str, float]:
    """For each variant, the share of the reference's greedy tokens that it ranks first."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    outputs = _greedy(_engine(REFERENCE, model, cache), prompts)
    return {
        v.name: round(_agreement_rate(_engine(v, model, cache), prompts, outputs), 4)
        for v in VARIANTS
        if v != REFERENCE
    }


def _engine(variant: Variant, model: Path, cache: Path) -> Engine:
    options = EngineOptions(
        engine=variant.engine,
        model_path=str(model_directory(variant, model, cache)),
        dtype=variant.dtype,
        eos_ids=(),
        max_sequence_length=256,
        max_batch_size=len(PROMPTS),
        max_prefill_padding=1.0,
        max_waiting_tokens=0,
        batch_safety_margin=20,
        cuda_memory_fraction=1.0,
        num_threads=usable_cores(),
        log_level="warning",
        json_output=False,
        cache_dir=str(cache),
    )
    engine, _ = load_engine(options, _end, print)
    engine.warm_up()
    return engine


def _end(reason: str) -> Any:
    raise StartError(reason)


def _sequences(inputs: list[list[int]], details: LogprobOptions) -> list[Sequence]:
    return [Sequence(Request(n, ids, NEW_TOKENS, logprob_options=details), 0.0) for n, ids in enumerate(inputs)]


def _greedy(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    rows = _sequences(prompts, LogprobOptions())
    for _ in range(NEW_TOKENS):
        for row, tokens in zip(rows, engine.step(StepPlan.compute_all(rows)).tokens, strict=True):
            row.num_computed_tokens = len(row.tokens)
            row.tokens += tokens
    return [row.tokens[row.prompt_length :] for row in rows]


def _agreement_rate(engine: Engine, prompts: list[list[int]], outputs: list[list[int]]) -> float:
    whole = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    facts = engine.step(
        StepPlan.compute_all(_sequences(whole, LogprobOptions(input_tokens=True, ranks=True)))
    ).prompt_logprobs
    return statistics.mean(fact.rank == 1 for row in facts.values() for fact in row[-NEW_TOKENS:])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onnx", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of the speed part; 0 skips it")
    parser.add_argument(
        "--agreement", action=argparse.BooleanOptionalAction, default=True, help="measure agreement, too"
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    args = parser.parse_args(arguments)
    model = ensure("smollm2", args.cache)
    rounds = [{v.name: measure_speed(v, model, args.cache) for v in VARIANTS} for _ in range(args.rounds)]
    shares = measure_agreement(model, args.cache) if args.agreement else {}
    report = {"rounds": rounds, "agreement": shares}
    report["summary"] = summary = _summary(rounds, shares)
    for name, row in summary.items():
        print(f"{name:<26}", *(f"{key} {value:<10g}" for key, value in row.items()))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(summary))
    return 0


def _summary(rounds: list[dict[str, Any]], shares: dict[str, float]) -> dict[str, dict[str, float]]:
    """Medians of tokens/s at each size, and the agreement."""
    found: dict[str, dict[str, float]] = {}
    for variant in VARIANTS:
        levels = [one[variant.name] for one in rounds]
        rates = {size: [level[size]["output_tokens_per_s"] for level in levels] for size in STREAMS if levels}
        found[variant.name] = {f"{size} streams": round(statistics.median(rate), 1) for size, rate in rates.items()}
        if shares:
            found[variant.name]["agreement"] = shares.get(variant.name, 1.0)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
