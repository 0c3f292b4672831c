"""`make bench-gpu`: the speed of tgis_native on one GPU, with a model of random weights that is made here.

The parts: a tiny model that is served (a smoke test of a minute; if it fails, nothing else runs), attention alone, the
engine alone with static batches and a mixed load, a profile of decode steps by kernel, and the server with streams. The
last three run compiled and eagerly. Times are wall-clock times, prompts are random tokens. Needs no network and no
files; `--model` keeps the model for the next command. A part that fails does not stop the others. The last line is one
JSON object, with failures under "error", and under "warnings" what was logged from WARNING up, such as what fell back
to eager execution. `--shape tiny` runs all of it on any machine.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.autograd import DeviceType
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engines import MAX_SEQUENCE_LENGTH, Job, TimedEngine, engine_options, load_warm_engine, run_jobs
from benchmarks.serving import running_server
from benchmarks.suite import run_load as load_server
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.bench.summary import summarize
from tgis.engines.base import Engine
from tgis.utils import logs


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its load."""

    config: dict[str, int]
    alone: tuple[tuple[int, int, int], ...]  # sequences, tokens in, tokens out; the largest batch last
    served: tuple[int, ...]  # streams, of `served_tokens` in and out
    served_tokens: tuple[int, int]
    mixed_requests: int
    mixed_tokens: tuple[int, int]  # medians of log-normal lengths in and out


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
    "llama-3.1-8b": Shape(  # the loads that vLLM was measured with
        LLAMA,
        alone=((1, 128, 256), (8, 512, 256), (64, 512, 256), (256, 512, 256), (256, 32, 256)),
        served=(1, 8, 64, 256),
        served_tokens=(512, 256),
        mixed_requests=1000,
        mixed_tokens=(192, 160),
    ),
    "tiny": Shape(
        TINY,
        alone=((1, 8, 16), (4, 32, 16)),
        served=(1, 4),
        served_tokens=(32, 16),
        mixed_requests=20,
        mixed_tokens=(12, 10),
    ),
}
SEED = 1
PARTS = ("smoke", "attention", "alone compiled", "profile compiled", "served compiled", "alone", "profile", "served")
_ROUNDS = 4  # requests of each stream of a served load
_PART_MINUTES = 4.0
_PROFILED_STEPS = range(40, 50)  # steps of a run after all prompts are computed
_PROFILED_KERNELS = 25  # the most expensive ones


def make_model(shape: Shape, directory: Path) -> None:
    """Save a model with random weights, and a tokenizer with its vocabulary size."""
    config = LlamaConfig(**shape.config, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    byte_tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))


def byte_tokenizer(size: int) -> Tokenizer:
    """A byte-level BPE padded with tokens that no merge produces: every text is encoded as bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(ord("a") + n) for n in range(26)]
    words = ("".join(word) for length in (3, 4) for word in product(letters, repeat=length))
    pieces = [*alphabet, *(word for word, _ in zip(words, range(size - len(alphabet)), strict=False))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def measure_engine(shape: Shape, model: Path, quantize: str, *, compiled: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The engine without a server: figures of `tgis bench` for each load."""
    engine, limits = _load_engine(shape, model, quantize, compiled=compiled)
    most = limits.max_batch_size
    cases = {f"{rows} x ({new}, {out})": [Job(new, out)] * rows for rows, new, out in shape.alone}
    cases[f"{shape.mixed_requests} mixed"] = list(mixed_jobs(shape))

    def run(jobs: list[Job]) -> dict[str, Any]:
        summary = asdict(summarize(run_jobs(limits, TimedEngine(engine), jobs, shape.config["vocab_size"]), 0.0))
        return {name: summary[name] for name in ("output_tokens_per_s", "ttft_ms", "tpot_ms", "max_gap_ms")}

    run([Job(*shape.alone[-1][1:])] * most)  # warm-up
    for name, jobs in cases.items():
        figures = run(jobs)
        print(f"{name:<24}{figures['output_tokens_per_s']:>10,.0f} tokens/s", flush=True)
        yield name, figures


def _load_engine(shape: Shape, model: Path, quantize: str, *, compiled: bool) -> tuple[Engine, BatchLimits]:
    most = max(rows for rows, _, _ in shape.alone)
    options = engine_options("tgis_native", model, "bfloat16", most)
    return load_warm_engine(msgspec.structs.replace(options, compile=compiled, quantize=quantize))


@dataclass(slots=True)
class _ProfiledEngine:
    """Profiles some steps of an engine."""

    engine: TimedEngine
    # acc_events=True avoids a warning
    profiler: Any = field(default_factory=partial(torch.profiler.profile, acc_events=True))
    seconds: float = 0.0  # of the profiled steps but the first, which includes the start of the profiler
    _count: int = 0

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        if self._count == _PROFILED_STEPS.start:
            self.profiler.start()
        tokens, seconds = self.engine.step(plan)
        if self._count in _PROFILED_STEPS[1:]:
            self.seconds += seconds
        self._count += 1
        if self._count == _PROFILED_STEPS.stop:
            self.profiler.stop()
        return tokens, seconds

    def release(self, seqs: Iterable[Sequence]) -> None:
        self.engine.release(seqs)


def measure_kernels(
    shape: Shape, model: Path, quantize: str, *, compiled: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Milliseconds and calls per decode step of each kernel (each operator on a CPU).

    Measured with one sequence and with the largest batch.
    """
    engine, limits = _load_engine(shape, model, quantize, compiled=compiled)
    new, out = shape.served_tokens[0], _PROFILED_STEPS.stop + 10
    for rows in (1, limits.max_batch_size):
        profiled = _ProfiledEngine(TimedEngine(engine))
        run_jobs(limits, profiled, [Job(new, out)] * rows, shape.config["vocab_size"])
        yield f"{rows} decodes", _kernel_times(profiled)


def _kernel_times(profiled: _ProfiledEngine) -> dict[str, Any]:
    steps, on_gpu = len(_PROFILED_STEPS), torch.cuda.is_available()
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU  # an operator's CUDA time would include its kernels'
    events = [event for event in profiled.profiler.key_averages() if event.device_type == device]
    times = [event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events]
    spent = {event.key: (us, event.count) for event, us in zip(events, times, strict=True)}
    kernels = {name: (round(us / 1e3 / steps, 4), count / steps) for name, (us, count) in spent.items()}
    most = sorted(kernels.items(), key=lambda item: -item[1][0])[:_PROFILED_KERNELS]
    for name, (ms, calls) in most:
        print(f"{ms:>10.4f} ms {calls:>8.1f} calls  {name:.120}", flush=True)
    busy = round(sum(ms for ms, _ in kernels.values()), 3)
    return {"step_ms": round(1e3 * profiled.seconds / (steps - 1), 3), "kernels_ms": busy, "kernels": dict(most)}


def mixed_jobs(shape: Shape) -> Iterator[Job]:
    """Requests of log-normal lengths; for the large shape 226 tokens in and 191 out on average."""
    draw, most = random.Random(SEED), MAX_SEQUENCE_LENGTH // 2 - 1
    for _ in range(shape.mixed_requests):
        draw.expovariate(1.0)  # an arrival time in earlier revisions: the lengths stay the same
        prompt, output = (min(max(round(n * draw.lognormvariate(0, 0.6)), 1), most) for n in shape.mixed_tokens)
        yield Job(prompt, output)


def measure_server(shape: Shape, model: Path, cache: Path, *, compiled: bool) -> Iterator[tuple[str, Any]]:
    """The server's start time, and the report for each number of streams."""
    options = ["--max-batch-size", str(max(shape.served)), "--deployment-framework", "tgis_native"]
    options += ["--pt2-compile", str(compiled).lower(), "--max-concurrent-requests", "512", "--log-level", "warning"]
    with _server_log() as log, running_server(model, cache, *options, log=log) as server:
        print(f"ready after {server.start_seconds:.1f} s", flush=True)
        yield "start_seconds", round(server.start_seconds, 1)
        load_server(server.target, max(shape.served), max(shape.served), *shape.served_tokens)  # warm-up
        for seed, streams in enumerate(shape.served, start=1):  # no prompt is in the prefix cache
            lengths = shape.served_tokens
            level = load_server(server.target, streams, _ROUNDS * streams, *lengths, "--seed", str(seed))
            speed, first = level["output_tokens_per_s"], level["ttft_ms"]["p50"]
            print(f"{streams:>4} streams   {speed:>10,.0f} tokens/s, TTFT p50 {first:,.0f} ms", flush=True)
            yield str(streams), level
        yield "warnings", log.read_text(errors="replace").splitlines()


@contextlib.contextmanager
def _server_log() -> Iterator[Path]:
    """A log file, which is printed at the end of the block."""
    with tempfile.NamedTemporaryFile(suffix=".log") as file:
        try:
            yield Path(file.name)
        finally:
            print(Path(file.name).read_text(errors="replace"), end="", file=sys.stderr, flush=True)


def smoke(cache: Path) -> Iterator[tuple[str, Any]]:
    """Serve a tiny model, compiled."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(SHAPES["tiny"], Path(directory))
        yield from measure_server(SHAPES["tiny"], Path(directory), cache, compiled=True)


def run_part(part: str, shape: Shape, model: Path, cache: Path, quantize: str) -> None:
    """Print a line of JSON for each case, and for the warnings of this process."""
    kind, _, compiled = part.partition(" ")
    if kind == "model":
        if not (model / "tokenizer.json").exists():  # the last file that is written
            make_model(shape, model)
        return
    logs.configure(level="info", json_output=False)
    logging.getLogger().addHandler(warnings := _WarningList())
    if kind == "smoke":
        cases = smoke(cache)
    elif kind == "alone":
        cases = measure_engine(shape, model, quantize, compiled=bool(compiled))
    elif kind == "profile":
        cases = measure_kernels(shape, model, quantize, compiled=bool(compiled))
    else:
        cases = measure_server(shape, model, cache, compiled=bool(compiled))
    for name, figures in cases:
        print(json.dumps({name: figures}), flush=True)
    if kind in ("alone", "profile"):
        print(json.dumps({"warnings": warnings.texts}), flush=True)


class _WarningList(logging.Handler):
    """The texts of what is logged from WARNING up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run_part_process(*command: str, seconds: float) -> dict[str, Any]:
    """The figures that a process prints as lines of JSON; under "error" why it failed, a timeout included."""
    figures: dict[str, Any] = {}
    started = time.monotonic()
    command = (sys.executable, *command)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        timer = Timer(seconds, _kill_group, (process,))
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
    taken = round(time.monotonic() - started, 1)
    if process.returncode:
        figures["error"] = f"ended with exit code {process.returncode} after {taken} s"
        print(figures["error"], file=sys.stderr, flush=True)
    return figures | {"seconds": taken}


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the process, and any server that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Make the model and run the parts, each in its own process; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,...", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too, after every part")
    parser.add_argument("--model", type=Path, metavar="DIR", help="keep the model there, or use the one found there")
    parser.add_argument(
        "--quantize", choices=("none", "int8", "int4"), default="none", help="weights of the engine alone"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="time limit of all parts, by default 4 minutes each")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.part:
        run_part(args.part, SHAPES[args.shape], args.model, args.cache, args.quantize)
        return 0
    for library, variable in (("inductor", "TORCHINDUCTOR_CACHE_DIR"), ("triton", "TRITON_CACHE_DIR")):
        os.environ.setdefault(variable, str(args.cache.absolute() / library))  # as servers with this cache do
    report: dict[str, Any] = {"shape": asdict(SHAPES[args.shape]) | {"quantize": args.quantize}}
    parts = _in_order(args.parts.split(","))
    end = time.monotonic() + 60 * (args.minutes or _PART_MINUTES * len(parts))
    with tempfile.TemporaryDirectory() as temporary:
        for number, part in enumerate(parts):
            print(f"== {part}", file=sys.stderr, flush=True)
            seconds = (end - time.monotonic()) / (len(parts) - number)  # unused time goes to the parts that follow
            kept = ("--cache", str(args.cache), "--model", str(args.model or temporary))
            shared = ("--shape", args.shape, "--quantize", args.quantize, *kept)
            itself = ("benchmarks.gpu", *shared, "--part", part)
            command = ("benchmarks.attention_time",) if part == "attention" else itself
            report[part] = run_part_process("-m", *command, seconds=seconds)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
            if part == "smoke" and "error" in report[part]:
                break
    print(json.dumps(report))
    return int(any("error" in figures for figures in report.values()))


def _in_order(parts: list[str]) -> list[str]:
    """The parts in order: those that need no large model, then making it, then the rest."""
    first = [part for part in ("smoke", "attention") if part in parts]
    others = [part for part in parts if part not in first]
    return [*first, *(["model"] if others else []), *others]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
