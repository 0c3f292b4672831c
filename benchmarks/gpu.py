"""`make bench-gpu`: the speed of tgis_native on one GPU, with a model of random weights that is made here.

Attention by itself, the engine alone with static batches and a mixed load, and the server with streams, the last two
also compiled. Needs no network and no files. A part that fails does not stop the others; the last line is one JSON
object, with failures under "error". `--shape tiny` runs all of it on any machine.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.mixed import MAX_SEQUENCE_LENGTH, engine_options, load_timed_engine
from benchmarks.serving import running_server
from benchmarks.suite import run_load as load_server
from tgis.bench.simulate import Simulation, TraceRequest, lognormal_trace
from tgis.utils import logs


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, the batch sizes and the lengths of its load."""

    config: dict[str, int]
    batch_sizes: tuple[int, ...]
    input_tokens: int  # half as many are generated
    mixed_requests: int  # of the mixed load


LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TINY = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SHAPES = {
    "llama-3.1-8b": Shape(LLAMA, (1, 8, 64, 256), 512, 1000),
    "tiny": Shape(TINY, (1, 4), 32, 20),
}
SEED = 1
PARTS = ("attention", "alone", "alone compiled", "served", "served compiled")
_PART_SECONDS = 240.0  # then it counts as failed


def make_model(shape: Shape, directory: Path) -> None:
    """Random weights, and a tokenizer with the model's vocabulary size."""
    config = LlamaConfig(**shape.config, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    _tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))


def _tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE filled up with words that no merge produces: every text is encoded as bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(ord("a") + n) for n in range(26)]
    words = ("".join(word) for length in (3, 4) for word in product(letters, repeat=length))
    pieces = [*alphabet, *(word for word, _ in zip(words, range(size - len(alphabet)), strict=False))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def measure_engine(shape: Shape, model: Path, *, compiled: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The engine without a server: the figures of `Simulation` for each load."""
    options = engine_options("tgis_native", model, "bfloat16", max(shape.batch_sizes))
    machine, limits = load_timed_engine(msgspec.structs.replace(options, compile=compiled))
    cases = {
        f"{rows} x ({shape.input_tokens}, {shape.input_tokens // 2})": _identical_jobs(rows, shape.input_tokens, shape)
        for rows in shape.batch_sizes
    }
    most = max(shape.batch_sizes)
    cases[f"{most} x (32, {shape.input_tokens // 2})"] = _identical_jobs(most, 32, shape)
    cases[f"{shape.mixed_requests} mixed"] = list(_mixed_jobs(shape))
    Simulation(
        limits, machine, cases[f"{most} x (32, {shape.input_tokens // 2})"], clients=most
    ).run()  # does not count
    for name, jobs in cases.items():
        summary = Simulation(limits, machine, jobs, clients=len(jobs)).run().summary()
        print(f"{name:<24}{summary['tokens_per_second']:>10,.0f} tokens/s", flush=True)
        yield name, summary


def _identical_jobs(rows: int, tokens: int, shape: Shape) -> list[TraceRequest]:
    return [TraceRequest(0.0, tokens, shape.input_tokens // 2)] * rows


def _mixed_jobs(shape: Shape) -> Iterator[TraceRequest]:
    """For the large shape, 226 tokens in and 191 out on average."""
    most = MAX_SEQUENCE_LENGTH // 2 - 1
    for job in lognormal_trace(
        shape.mixed_requests, 1.0, SEED, 3 * shape.input_tokens // 8, 5 * shape.input_tokens // 16
    ):
        yield replace(job, prompt_tokens=min(job.prompt_tokens, most), output_tokens=min(job.output_tokens, most))


def measure_server(shape: Shape, model: Path, cache: Path, *, compiled: bool) -> Iterator[tuple[str, Any]]:
    """The server's start time, and the report for each number of streams."""
    options = ["--max-batch-size", str(max(shape.batch_sizes)), "--deployment-framework", "tgis_native"]
    options += ["--pt2-compile", str(compiled).lower(), "--max-concurrent-requests", "512"]
    with running_server(model, cache, *options) as server:
        print(f"ready after {server.start_seconds:.1f} s", flush=True)
        yield "start_seconds", round(server.start_seconds, 1)
        for rows in shape.batch_sizes:
            level = load_server(server.target, rows, 2 * rows, shape.input_tokens, shape.input_tokens // 2)
            speed, first = level["output_tokens_per_s"], level["ttft_ms"]["p50"]
            print(f"{rows:>4} streams   {speed:>10,.0f} tokens/s, TTFT p50 {first:,.0f} ms", flush=True)
            yield str(rows), level


def run_part(part: str, shape: Shape, model: Path, cache: Path) -> None:
    """Print a line of JSON for each case."""
    kind, _, compiled = part.partition(" ")
    if kind == "model":
        make_model(shape, model)
        return
    logs.configure(level="info", json_output=False)
    cases = (
        measure_engine(shape, model, compiled=bool(compiled))
        if kind == "alone"
        else measure_server(shape, model, cache, compiled=bool(compiled))
    )
    for name, figures in cases:
        print(json.dumps({name: figures}), flush=True)


def run_part_process(*command: str) -> dict[str, Any]:
    """The figures that a Python process prints as lines of JSON; under "error" why it failed."""
    figures: dict[str, Any] = {}
    started = time.monotonic()
    command = (sys.executable, *command)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        timer = Timer(_PART_SECONDS, _kill_group, (process,))
        timer.start()
        try:
            for line in process.stdout or ():
                if line.startswith("{") and line.endswith("}\n"):
                    figures |= json.loads(line)
                else:
                    print(line, end="", file=sys.stderr, flush=True)
            process.wait()
        finally:
            timer.cancel()
            _kill_group(process)
    seconds = round(time.monotonic() - started, 1)
    if process.returncode:
        figures["error"] = f"ended with exit code {process.returncode} after {seconds} s"
        print(figures["error"], file=sys.stderr, flush=True)
    return figures | {"seconds": seconds}


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the process, and any server that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Make the model and run the parts, each in its own process; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, after every part")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.part:
        run_part(args.part, SHAPES[args.shape], args.model, args.cache)
        return 0
    report: dict[str, Any] = {"shape": asdict(SHAPES[args.shape])}
    with tempfile.TemporaryDirectory() as model:
        for part in ("model", *args.parts.split(",")):
            print(f"== {part}", file=sys.stderr, flush=True)
            shared = ("--shape", args.shape, "--cache", str(args.cache), "--model", model, "--part", part)
            where = ("benchmarks.attention_time",) if part == "attention" else ("benchmarks.gpu", *shared)
            report[part] = run_part_process("-m", *where)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return int(any("error" in figures for figures in report.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
