"""What the batcher's policies gain: the same load of mixed lengths with and without them, on an engine and simulated.

`python -m benchmarks.batching_policies` prints a table and, last, one line of JSON. "plain" is continuous batching,
first come, first served, without memory costs and padding limit; "unpadded" is the default policy with
MAX_PREFILL_PADDING=1. Batch size, memory and requests are the same. The times include neither gRPC nor text.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from demo.fetch import ensure
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.bench.simulate import (
    SMOLLM2_TWO_CORES,
    SimulatedEngine,
    Simulation,
    StepEngine,
    TraceRequest,
    bimodal_trace,
    lognormal_trace,
)
from tgis.engine_core.main import batch_limits
from tgis.engines import load_engine
from tgis.engines.base import Engine
from tgis.ipc.messages import EngineOptions
from tgis.utils.cpus import usable_cores

MAX_SEQUENCE_LENGTH = 2048
SEED = 1
TRACES: dict[str, Callable[[int], Iterator[TraceRequest]]] = {
    "lognormal": lambda count: lognormal_trace(count, 1.0, SEED),
    "bimodal": lambda count: bimodal_trace(count, 1.0, SEED),
}
POLICIES: dict[str, Callable[[BatchLimits], BatchLimits]] = {
    "default": lambda limits: limits,
    "unpadded": lambda limits: replace(limits, max_prefill_padding=1.0),
    "plain": lambda limits: replace(limits, max_prefill_padding=1.0, max_waiting_tokens=0, prefill_tokens=1 << 62),
}
SIMULATED_REQUESTS = 5000
COLUMNS = ("tokens_per_second", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "prefill_padding", "decode_padding")


@dataclass(slots=True)
class TimedEngine:
    """A real engine whose step times are wall-clock times, planning between the steps included.

    For one closed-loop run: the engine never waits for a request.
    """

    engine: Engine
    _last: float = field(default_factory=time.perf_counter)

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        """The tokens, and the seconds since the previous step."""
        result = self.engine.step(plan)
        assert not result.failed
        started, self._last = self._last, time.perf_counter()
        return result.tokens, self._last - started

    def release(self, seqs: Iterable[Sequence]) -> None:
        self.engine.release([*seqs])


def engine_options(name: str, model: Path, dtype: str, size: int, cache: Path = Path(".cache")) -> EngineOptions:
    """A server's default options, but for the batch size and a disabled prefix cache."""
    return EngineOptions(
        engine=name,
        model_path=str(model),
        dtype=dtype,
        eos_ids=(),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        max_batch_size=size,
        max_prefill_padding=0.2,
        max_waiting_tokens=24,
        batch_safety_margin=20,
        cuda_memory_fraction=1.0,
        num_threads=usable_cores(),
        log_level="warning",
        json_output=False,
        prefix_cache=False,
        cache_dir=str(cache),
    )


def load_warm_engine(options: EngineOptions) -> tuple[Engine, BatchLimits]:
    """An engine after its warm-up, and the limits of its batches."""
    engine, _ = load_engine(options, sys.exit, print)
    engine.warm_up()
    return engine, batch_limits(options, engine.info)


def compare_policies(
    new_run: Callable[[], StepEngine], limits: BatchLimits, trace: str, requests: int, clients: int
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        outcome = Simulation(policy(limits), new_run(), TRACES[trace](requests), clients).run()
        figures[name] = outcome.summary() | {"queue_jumps": outcome.counters.queue_jumps}
        print(f"{trace:<10}{limits.max_batch_size:>4}  {name:<10}{_row(figures[name])}", flush=True)
    plain = figures["plain"]["tokens_per_second"]
    return figures | {"speedup": round(figures["default"]["tokens_per_second"] / plain, 3)}


def _simulated_engine() -> StepEngine:
    return SimulatedEngine(SMOLLM2_TWO_CORES)


def _row(figures: dict[str, float]) -> str:
    return "".join(f"{figures[name]:>18,.3f}" if "padding" in name else f"{figures[name]:>18,.1f}" for name in COLUMNS)


def main(arguments: list[str]) -> int:
    """Compare the policies on the engine, then simulated at scale."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batching_policies", description="measure the batcher's rules"
    )
    parser.add_argument("--engine", default="hf_transformers", metavar="NAME")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--sizes", default="12,64", metavar="N,...", help="MAX_BATCH_SIZE")
    parser.add_argument("--traces", default=",".join(TRACES), metavar="NAME,...", help="lognormal, bimodal")
    parser.add_argument("--clients", type=int, default=64, metavar="N", help="closed-loop clients")
    parser.add_argument("--requests", type=int, default=300, metavar="N", help="requests of each run on the engine")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    sizes = [int(size) for size in args.sizes.split(",")]
    options = engine_options(args.engine, ensure("smollm2", args.cache), args.dtype, max(sizes), args.cache)
    engine, limits = load_warm_engine(options)
    Simulation(limits, TimedEngine(engine), TRACES["lognormal"](2 * max(sizes)), clients=max(sizes)).run()  # warm-up
    report: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(args).items()}}
    print(f"{args.engine:<26}{''.join(f'{name:>18}' for name in COLUMNS)}")
    runs = list(product(args.traces.split(","), sizes))
    for trace, size in runs:
        sized = replace(limits, max_batch_size=size)
        found = compare_policies(lambda: TimedEngine(engine), sized, trace, args.requests, args.clients)
        report[f"{args.engine} {trace} {size}"] = found
    print("simulated" if limits.padded else "")
    for trace, size in runs if limits.padded else ():
        sized = replace(limits, max_batch_size=size)
        found = compare_policies(_simulated_engine, sized, trace, SIMULATED_REQUESTS, args.clients)
        report[f"simulated {trace} {size}"] = found
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
