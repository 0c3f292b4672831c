"""Times of tgis_native's steps with decodes and chunks of prompts, and the `StepModel` that fits them.

Streams decode beside prompts of 1500 tokens that are computed in chunks of a fixed size. `measure` takes three minutes;
`python -m benchmarks.simulated_policies --measure` calls it.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.batching_policies import TimedEngine, engine_options, load_warm_engine
from benchmarks.serving import cpu_name
from demo.fetch import ensure
from tgis.batcher.prefill_budget import PrefillBudget
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.bench.simulate import Simulation, TraceRequest
from tgis.engines.fake import StepModel

STREAMS, CHUNKS = (1, 8, 32, 63), (16, 64, 128, 256, 448)
INPUT_TOKENS, OUTPUT_TOKENS, LONG_INPUT_TOKENS = 130, 60, 1500
PARTS = ("step", "row", "context", "prefill", "prefill_token", "prefill_context")  # of StepModel
FIT_ROUNDS = 20

# Of a step: 1, rows that decode, tokens of their context, whether there are prompts, their tokens, tokens attended to.
Features = list[int]
RecordedStep = tuple[Features, float]  # and the seconds


@dataclass(slots=True)
class StepRecorder:
    """An engine that records what its steps compute, and their times."""

    engine: TimedEngine
    steps: list[RecordedStep] = field(default_factory=list)

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        work = zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        chunks = [(count, seq.num_computed_tokens + count // 2) for seq, count in work if not seq.decoding]
        decodes = [len(seq.tokens) for seq in plan.seqs if seq.decoding]
        prompts = [bool(chunks), sum(count for count, _ in chunks), sum(count * context for count, context in chunks)]
        tokens, seconds = self.engine.step(plan)
        self.steps.append(([1, len(decodes), sum(decodes), *map(int, prompts)], seconds))
        return tokens, seconds

    def release(self, seqs: Iterable[Sequence]) -> None:
        self.engine.release(seqs)


def measure(cache: Path) -> dict[str, Any]:
    """The CPU, the fitted times, and the median milliseconds of steps by numbers of decodes and tokens of prompts."""
    options = engine_options("tgis_native", ensure("smollm2", cache), "bfloat16", max(STREAMS) + 1, cache)
    engine, limits = load_warm_engine(options)
    Simulation(limits, TimedEngine(engine), [TraceRequest(0.0, INPUT_TOKENS, 30)] * 32, 32).run()  # warm-up
    steps: list[RecordedStep] = []
    for streams, chunk in product(STREAMS, CHUNKS):
        recorder = StepRecorder(TimedEngine(engine))
        num_long = max(1, chunk * OUTPUT_TOKENS // LONG_INPUT_TOKENS // 4)
        load = [TraceRequest(0.0, INPUT_TOKENS, OUTPUT_TOKENS)] * streams
        load += [TraceRequest(0.0, LONG_INPUT_TOKENS, 2)] * num_long
        with patch.object(PrefillBudget, "budget", return_value=chunk):
            Simulation(limits, recorder, load, streams + 1).run()
        steps += recorder.steps
    return summarize(cpu_name(), steps)


def summarize(cpu: str, steps: list[RecordedStep]) -> dict[str, Any]:
    groups = defaultdict(list)
    for (_, rows, _, _, tokens, _), seconds in steps:
        groups[_rounded_up(rows), _rounded_up(tokens)].append(1e3 * seconds)
    model, errors = fit(steps)
    return {
        "cpu": cpu,
        "steps": len(steps),
        "model": model,
        "relative_errors": {"p50": errors[len(errors) // 2], "p90": errors[9 * len(errors) // 10]},
        "median_ms": [
            {"decodes_up_to": rows, "prompt_tokens_up_to": tokens, "steps": len(found), "ms": statistics.median(found)}
            for (rows, tokens), found in sorted(groups.items())
        ],
    }


def fit(steps: list[RecordedStep]) -> tuple[dict[str, float], list[float]]:
    """The times with the smallest relative errors of any kind of step, and these errors, sorted.

    Least absolute deviations, by least squares with new weights: a step that was interrupted says little.
    """
    kinds = [(_rounded_up(features[1]), _rounded_up(features[4])) for features, _ in steps]
    seconds = torch.tensor([taken for _, taken in steps], dtype=torch.float64)
    features = torch.tensor([found for found, _ in steps], dtype=torch.float64) / seconds[:, None]
    frequency = torch.tensor([kinds.count(kind) for kind in kinds]) ** 0.5
    errors = torch.ones_like(seconds)
    for _ in range(FIT_ROUNDS):
        weights = 1 / frequency / errors.clamp(min=0.01) ** 0.5
        times = torch.linalg.lstsq(features * weights[:, None], weights[:, None], driver="gelsd").solution.flatten()
        errors = (features @ times - 1).abs()
    return dict(zip(PARTS, times.tolist(), strict=True)), errors.sort().values.tolist()


def step_model(report: dict[str, Any]) -> StepModel:
    return StepModel(block_size=16, **{f"{part}_seconds": seconds for part, seconds in report["model"].items()})


def _rounded_up(count: int) -> int:
    """The next power of two, or 0."""
    return 1 << (count - 1).bit_length() if count else 0
