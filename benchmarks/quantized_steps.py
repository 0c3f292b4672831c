"""`python -m benchmarks.quantized_steps`: decode steps of tgis_native with quantized weights and KV caches, in turns.

All variants of a model are loaded side by side; in a round each decodes some steps for one number of sequences, in an
order that changes. The logits are quantized too where weights are. Times are milliseconds of a step, the median over
rounds; factors are those of the plain model. With --llama-cpp, llama.cpp takes its turns with GGUF files, in processes
of its own; it needs llama-cpp-python. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.engines import engine_options
from benchmarks.serving import cpu_name
from demo.fetch import ensure
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.request import Request

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"quantize": "int8", "quantize_logits": True},
    "int4": {"quantize": "int4", "quantize_logits": True},
    "KV int8": {"kv_cache_dtype": "int8"},
}
LOADS = ((1, 130), (8, 130), (32, 130), (1, 2000), (8, 2000))  # sequences, and tokens of each
STEPS, PLAIN = 12, "plain"


def step_seconds(engine: Engine, count: int, context: int) -> float:
    """The median time of decode steps after prompts, which are computed first."""
    size = engine.info.block_size
    blocks = -(-(context + STEPS + 1) // size)
    seqs = []
    for number in range(count):
        seq = Sequence(Request(number, [1 + (7 * number + at) % 997 for at in range(context)], STEPS), 0.0)
        seq.block_table = list(range(number * blocks, (number + 1) * blocks))
        seqs.append(seq)
        while seq.num_uncomputed_tokens:
            chunk = min(512, seq.num_uncomputed_tokens)
            sampled = [seq] if chunk == seq.num_uncomputed_tokens else []
            result = engine.step(StepPlan([seq], [chunk], sampled, has_prefill=True))
            seq.num_computed_tokens += chunk
            if sampled:
                seq.tokens += result.tokens[0]
                break
    found = []
    for _ in range(STEPS):
        started = time.perf_counter()
        result = engine.step(StepPlan(seqs, [1] * count, seqs, has_prefill=False))
        found.append(time.perf_counter() - started)
        for seq, tokens in zip(seqs, result.tokens, strict=True):
            seq.num_computed_tokens += 1
            seq.tokens += tokens
    engine.release(seqs)
    return statistics.median(found[2:])  # the first are recorded and verified


def llama_cpp_step(file: Path, count: int, context: int) -> float:
    """Seconds of a decode step of llama.cpp, in a process of its own, so that no threads are shared."""
    lengths = ("--streams", str(count), "--input-tokens", str(context), "--steps", str(STEPS))
    command = [sys.executable, "-m", "benchmarks.llama_cpp", str(file), *lengths]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return float(json.loads(done.stdout)["step_ms"][str(count)]) / 1e3


def medians_ms(load: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    """The median of each system in milliseconds; prints them and how many times as fast as the first each is."""
    medians = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    base = next(iter(medians.values()))
    print(f"{load}: ", *(f"{name} {taken:.2f} ({base / taken:.2f})" for name, taken in medians.items()), flush=True)
    return {name: round(taken, 3) for name, taken in medians.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized_steps", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the demo model")
    parser.add_argument("--dtype", default="bfloat16", metavar="NAME")
    parser.add_argument("--cpu-isa", default="auto", metavar="NAME")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--checkpoints", nargs="*", type=Path, default=[], metavar="DIR", help="that are quantized")
    parser.add_argument("--llama-cpp", nargs="*", type=Path, default=[], metavar="GGUF", help="for llama.cpp")
    parser.add_argument("--contexts", nargs="+", type=int, default=[130, 2000], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    model = args.model or ensure("smollm2", args.cache)
    cases = {name: (model, VARIANTS[name]) for name in args.variants} | {
        path.name: (path, {}) for path in args.checkpoints
    }
    systems: dict[str, partial[float]] = {}
    for name, (path, others) in cases.items():
        plain = engine_options("tgis_native", path, args.dtype, 32, args.cache)
        more = {"max_sequence_length": 2048, "kv_cache_bytes": 3 << 30, "cpu_isa": args.cpu_isa, **others}
        engine = PagedEngine(msgspec.structs.replace(plain, **more))
        engine.warm_up()
        systems[name] = partial(step_seconds, engine)
    systems |= {f"llama.cpp {file.name}": partial(llama_cpp_step, file) for file in args.llama_cpp}
    report: list[dict[str, Any]] = []
    for count, context in [load for load in LOADS if load[1] in args.contexts]:
        times: dict[str, list[float]] = {name: [] for name in systems}
        for number in range(args.rounds):
            for name in [*systems][:: -1 if number % 2 else 1]:
                times[name].append(systems[name](count, context))
        report.append({"sequences": count, "context": context, "ms": medians_ms(f"{count} x {context}", times)})
    found = {"cpu": cpu_name(), "model": model.name, "dtype": args.dtype, "cpu_isa": args.cpu_isa, "steps": report}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
