"""`python -m benchmarks.cpu_steps`: decode steps on this CPU, and the lower bounds of their linear layers.

The bound of reading is the weights' bytes over the read bandwidth; the bound of multiplying is the multiply-adds over
the rate of a GEMM whose operands are in the cache. The layers are also measured alone, one after the other as in a
step, with every GEMM that this CPU can run. Steps of llama.cpp, if llama-cpp-python is installed, alternate with those
of tgis. Prompts alternate with their linear layers alone. The last line is one JSON object; `--only-prefill` leaves the
rest out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import transformers_generate
from benchmarks.engines import Job, TimedEngine, engine_options, load_warm_engine, run_jobs
from benchmarks.serving import cpu_name
from demo.fetch import ensure
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine
from tgis.engines.kernels.cpu.gemm import CpuGemm, Gemm, MakeGemm, OneDnnGemm, our_gemms
from tgis.engines.kernels.cpu.library import ISAS, CpuKernels, cpu_flags, load_kernels
from tgis.engines.kernels.cpu.quantized import QuantizedGemm, stored
from tgis.engines.quantization.weight import ActivationCodes, quantize
from tgis.utils.cpus import usable_cores

ROWS = (1, 8, 32, 128, 512)
STREAMS = (1, 8, 32)
INPUT_TOKENS, STEPS = 130, 40
PROMPT_TOKENS = 1500
READ_BYTES = 1 << 29
REPEATS = 5
ROUNDS = 3

Times = dict[int, float]  # milliseconds by number of rows or sequences


@dataclass(slots=True)
class DecodeTimer:
    """An engine that records the times of steps in which all sequences decode."""

    engine: TimedEngine
    seconds: list[float] = field(default_factory=list)

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        tokens, seconds = self.engine.step(plan)
        if not plan.has_prefill:
            self.seconds.append(seconds)
        return tokens, seconds

    def release(self, seqs: Iterable[Sequence]) -> None:
        self.engine.release(seqs)


def measure_machine(kernels: CpuKernels | None, dtype: torch.dtype) -> dict[str, Any]:
    known: set[str] = set().union(*ISAS.values())
    return {
        "cpu": cpu_name(),
        "flags": " ".join(sorted(known & cpu_flags())),
        "threads": torch.get_num_threads(),
        "kernels": kernels.isa if kernels else "none",
        "torch": torch.__version__,
        "read_gb_s": _read_gb_s(kernels),
        "multiply_add_g_s": _multiply_add_g_s(kernels, dtype),
    }


def _read_gb_s(kernels: CpuKernels | None) -> float:
    """The read bandwidth: that of PyTorch's sum or of our GEMM with one row, whichever is higher."""
    weight = torch.ones(READ_BYTES // 2048, 1024, dtype=torch.bfloat16)
    gemms = [make(weight) for make in our_gemms(weight, kernels, weight.dtype).values()]
    runs = [weight.view(torch.float32).sum, *(partial(gemm, weight[:1], None) for gemm in gemms)]
    return READ_BYTES / min(_best_seconds(*runs)) / 1e9


def _multiply_add_g_s(kernels: CpuKernels | None, dtype: torch.dtype) -> float:
    """The multiply-add rate of the fastest GEMM, with 128 rows and a weight of 512 x 512 for each thread."""
    weight, x = (torch.ones(rows, 512, dtype=dtype) for rows in (512 * torch.get_num_threads(), 128))
    runs = [partial(make(weight), x, None) for make in _gemms(weight, kernels).values()]
    return int(weight.numel()) * len(x) / min(_best_seconds(*runs)) / 1e9


def measure_linear_layers(weights: list[Tensor], kernels: CpuKernels | None) -> dict[str, Times]:
    """Milliseconds of all linear layers by GEMM and number of rows: the best of runs that alternate between GEMMs."""
    makers = [_gemms(weight, kernels) | _half_gemms(weight, kernels) | _quantized_gemms(kernels) for weight in weights]
    names = list(makers[0])
    layers = {name: [made[name](weight) for made, weight in zip(makers, weights, strict=True)] for name in names}
    found: dict[str, Times] = {name: {} for name in names}
    for rows in ROWS:
        inputs = {weight.shape[1]: torch.ones(rows, weight.shape[1], dtype=weight.dtype) for weight in weights}
        runs = [partial(_multiply, layers[name], [inputs[weight.shape[1]] for weight in weights]) for name in names]
        for name, seconds in zip(names, _best_seconds(*runs), strict=True):
            found[name][rows] = 1e3 * seconds
    return found


def _multiply(layers: list[Gemm], inputs: list[Tensor]) -> None:
    for gemm, x in zip(layers, inputs, strict=True):
        gemm(x, None)


def _gemms(weight: Tensor, kernels: CpuKernels | None) -> dict[str, MakeGemm]:
    onednn: dict[str, MakeGemm] = {"onednn": OneDnnGemm} if OneDnnGemm.supports(weight) else {}
    return our_gemms(weight, kernels, weight.dtype) | onednn


def _half_gemms(weight: Tensor, kernels: CpuKernels | None) -> dict[str, MakeGemm]:
    """GEMMs with weights in 16 bits beside float32."""
    if kernels is None or weight.dtype != torch.float32:
        return {}

    def make(half: torch.dtype, weight: Tensor) -> Gemm:
        return CpuGemm(weight.to(half), kernels, torch.float32)

    return {str(half): partial(make, half) for half in (torch.bfloat16, torch.float16)}


def _quantized_gemms(kernels: CpuKernels | None) -> dict[str, MakeGemm]:
    """GEMMs with weights quantized by QUANTIZE=int8 and int4."""

    def make(bits: int, weight: Tensor) -> Gemm:
        assert kernels is not None
        return QuantizedGemm(stored(quantize(weight, bits, ActivationCodes())), kernels, weight.dtype)

    return {f"int{bits}": partial(make, bits) for bits in (8, 4)} if kernels is not None else {}


def _best_seconds(*runs: Callable[[], object]) -> list[float]:
    """The best time of each action, after an unmeasured first round."""
    found = [[_seconds(run) for run in runs] for _ in range(1 + REPEATS)]
    return [min(times) for times in zip(*found[1:], strict=True)]


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def measure_prefill(
    engine: Engine, limits: BatchLimits, weights: list[Tensor], kernels: CpuKernels | None
) -> dict[str, float]:
    """Prompt tokens per second, and how many there would be if the linear layers were all: medians of alternating
    rounds, and the median of their ratios.
    """
    layers = [next(iter(_gemms(weight, kernels).values()))(weight) for weight in weights]
    chunk = engine.info.max_prefill_tokens
    sizes = [min(chunk, PROMPT_TOKENS - start) for start in range(0, PROMPT_TOKENS, chunk)]
    inputs = [[torch.ones(rows, weight.shape[1], dtype=weight.dtype) for weight in weights] for rows in sizes]

    def multiply() -> None:
        for each in inputs:
            _multiply(layers, each)

    def compute_prompt() -> None:
        run_jobs(limits, TimedEngine(engine), [Job(PROMPT_TOKENS, 1)])

    rounds = [(_seconds(compute_prompt), _seconds(multiply)) for _ in range(1 + 2 * REPEATS)][1:]
    prompts, alone = (PROMPT_TOKENS / statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(linear / prompt for prompt, linear in rounds)
    return {"tokens_per_s": prompts, "linear_layers_allow": alone, "ratio": ratio}


def measure_steps(model: Path, dtype: str, engine: Engine, limits: BatchLimits) -> dict[str, Times]:
    """Decode steps of tgis_native and, if it is installed, of llama.cpp: medians of alternating rounds."""
    ways: dict[str, Callable[[], Times]] = {"tgis": partial(_time_engine, engine, limits)}
    if dtype == "bfloat16" and find_spec("llama_cpp"):
        ways["llama.cpp"] = partial(_time_llama_cpp, model)
    rounds = [{name: way() for name, way in ways.items()} for _ in range(ROUNDS)]
    return {name: {n: statistics.median(each[name][n] for each in rounds) for n in STREAMS} for name in ways}


def _time_engine(engine: Engine, limits: BatchLimits) -> Times:
    """Median times of decode steps, planning included, by number of streams."""
    found = {}
    for streams in STREAMS:
        timer = DecodeTimer(TimedEngine(engine))
        run_jobs(limits, timer, [Job(INPUT_TOKENS, STEPS)] * streams)
        found[streams] = 1e3 * statistics.median(timer.seconds)
    return found


def _time_llama_cpp(model: Path) -> Times:
    """Times of llama.cpp, measured in a process of its own, so that no thread pool is shared."""
    lengths = ("--input-tokens", str(INPUT_TOKENS), "--steps", str(STEPS))
    command = [sys.executable, "-m", "benchmarks.llama_cpp", str(model), *lengths]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {int(streams): taken for streams, taken in json.loads(done.stdout)["step_ms"].items()}


def measure_transformers(model: nn.Module) -> Times:
    """The time of one step of `generate`: a long run minus a short one, over the difference in steps."""
    found = {}
    for streams in STREAMS:
        inputs = torch.randint(1000, (streams, INPUT_TOKENS))
        few, many = (transformers_generate.time_generate(model, inputs, tokens) for tokens in (2, 2 + STEPS))
        found[streams] = 1e3 * (many - few) / STEPS
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_steps", description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--cpu-isa", default="auto", metavar="NAME", help="like the server's option CPU_ISA")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--only-prefill", action="store_true", help="measure prompts and nothing else")
    args = parser.parse_args(arguments)
    torch.set_num_threads(usable_cores())
    torch.set_grad_enabled(mode=False)
    kernels, path = load_kernels(args.cpu_isa, str(args.cache)), ensure("smollm2", args.cache)
    model = transformers_generate.load(str(path), args.dtype, "cpu")
    weights = [module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)]
    in_layers = [weight for weight in weights if len(weight) != model.config.vocab_size]
    engine, limits = load_warm_engine(engine_options("tgis_native", path, args.dtype, max(STREAMS), args.cache))
    prefill = measure_prefill(engine, limits, in_layers, kernels)
    print(
        "prompts of {} tokens: {tokens_per_s:.0f} tokens/s, the linear layers alone {linear_layers_allow:.0f}, "
        "ratio {ratio:.2f}".format(PROMPT_TOKENS, **prefill)
    )
    if args.only_prefill:
        print(json.dumps({"cpu": cpu_name(), "prefill": prefill}))
        return 0
    machine = measure_machine(kernels, getattr(torch, args.dtype))
    read_ms = sum(weight.nbytes for weight in weights) / machine["read_gb_s"] / 1e6
    multiply_ms = sum(weight.numel() for weight in weights) / machine["multiply_add_g_s"] / 1e6  # for each row
    report = {
        "machine": machine,
        "dtype": args.dtype,
        "floor_ms": {"reading": dict.fromkeys(ROWS, read_ms), "multiplying": {n: n * multiply_ms for n in ROWS}},
        "linear_layers_ms": measure_linear_layers(weights, kernels),
        "step_ms": {"transformers": measure_transformers(model)} | measure_steps(path, args.dtype, engine, limits),
        "prefill": prefill,
    }
    _print_tables(report)
    print(json.dumps(report))
    return 0


def _print_tables(report: dict[str, Any]) -> None:
    for name, value in report["machine"].items():
        print(f"{name:<18}{value:.1f}" if isinstance(value, float) else f"{name:<18}{value}")
    print(f"\nall linear layers of SmolLM2-135M in {report['dtype']}, ms")
    print(f"{'rows':<16}" + "".join(f"{rows:>9}" for rows in ROWS))
    for name, times in (report["floor_ms"] | report["linear_layers_ms"]).items():
        print(f"{name:<16}" + "".join(f"{times[rows]:>9.1f}" for rows in ROWS))
    print("\ndecode step, ms")
    print(f"{'sequences':<16}" + "".join(f"{streams:>9}" for streams in STREAMS))
    for name, steps in report["step_ms"].items():
        print(f"{name:<16}" + "".join(f"{steps[n]:>9.1f}" for n in STREAMS))
    floor, steps = report["floor_ms"]["reading"], report["step_ms"]["tgis"]
    print(f"{'tgis / reading':<16}" + "".join(f"{steps[n] / floor[n]:>9.2f}" for n in STREAMS), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
