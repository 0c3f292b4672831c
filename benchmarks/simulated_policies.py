"""`python -m benchmarks.simulated_policies`: what each policy of the batcher gains, in simulations with and without it.

The step times are those of SmolLM2 in bfloat16 on two cores: of hf_transformers for padded batches; of tgis_native for
KV blocks, from a file that `--measure` writes anew on this machine. 64 clients in a closed loop; memory for one million
tokens of context, or 6000 where a policy is about memory. The last line is JSON: for each policy and trace the figures
with it, then without it.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.step_times import measure, step_model
from tgis.batcher import admission, batcher
from tgis.batcher.capacity import BatchLimits, PeakEstimator
from tgis.batcher.prefill_budget import PrefillBudget, PrefillInterleaving
from tgis.batcher.sequence import Sequence
from tgis.bench.simulate import (
    SMOLLM2_TWO_CORES,
    SimulatedEngine,
    Simulation,
    TraceRequest,
    bimodal_trace,
    lognormal_trace,
)
from tgis.engines.fake import StepModel

REQUESTS, CLIENTS, SEED = 300, 64, 1
STEP_TIMES = Path(__file__).parents[1] / "docs" / "bench-step-times-cpu.json"
PADDED = BatchLimits(64, 10**6, 512, max_prefill_padding=0.2, padded=True)
PAGED = BatchLimits(64, 10**6, 512, block_size=16)  # tgis_native's defaults on CPUs
SHORT = 6000
GAPS_MS = (100, 150, 200, 400)


def _rare_long_prompts() -> Iterator[TraceRequest]:
    draw = random.Random(SEED)
    for _ in range(REQUESTS):
        yield TraceRequest(0.0, 5000, 50) if draw.random() < 0.03 else TraceRequest(0.0, 100, 60)


TRACES: dict[str, Callable[[], Iterator[TraceRequest]]] = {
    "chat": lambda: lognormal_trace(REQUESTS, 1.0, SEED),
    "long": lambda: lognormal_trace(REQUESTS, 1.0, SEED, 400, 200),
    "bimodal": lambda: bimodal_trace(REQUESTS, 1.0, SEED),
    "rare long prompts": _rare_long_prompts,
}


def _in_order(seqs: list[Sequence], budget: int, _: int) -> list[tuple[Sequence, int]]:
    """Replacement of `split_budget` that gives the whole budget to the oldest prompts."""
    scheduled = []
    for seq in seqs:
        count = 1 if seq.decoding else min(seq.num_uncomputed_tokens, budget)
        budget -= 0 if seq.decoding else count
        scheduled += [(seq, count)] if count else []
    return scheduled


def _all_for_prompts(_: PrefillBudget, seqs: list[Sequence], max_tokens: int) -> int:
    return max(max_tokens - sum(seq.decoding for seq in seqs), 1)


def _by_slowdown(_: PrefillBudget, seqs: list[Sequence], max_tokens: int, paged: StepModel) -> int:
    """Replacement of `PrefillBudget.budget`: a step may take 2.6 times as long as one without prompts.

    It knows the step times; the rule that did this before learnt them, and let some steps take longer.
    """
    lengths = [len(seq.tokens) for seq in seqs if seq.decoding]
    decode_seconds = paged.step_seconds + paged.row_seconds * len(lengths) + paged.context_seconds * sum(lengths)
    fitting = int((1.6 * decode_seconds - paged.prefill_seconds) / paged.prefill_token_seconds)
    return min(max(fitting, 16), max_tokens - len(lengths)) if lengths else max_tokens


@contextmanager
def _old_budget(budget: Any) -> Iterator[None]:
    """Another budget, and admission that lets one long prompt beside the oldest wait for it."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(PrefillBudget, "budget", budget))
        stack.enter_context(ONE_CHUNK())
        yield


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(owner, name, value)


NO_OVERTAKING = _replaced(admission, "MAX_OVERTAKERS", -1)
ONE_CHUNK = _replaced(admission, "MAX_CHUNKS", 1)
# limits with the policy, limits without it, and the patch that removes its code
Policies = dict[str, tuple[BatchLimits, BatchLimits, Callable[[], AbstractContextManager[Any]]]]


def _policies(paged: StepModel) -> Policies:
    little_padded, little_paged = replace(PADDED, token_capacity=SHORT), replace(PAGED, token_capacity=SHORT)
    worst_case = _replaced(PeakEstimator, "fits", PeakEstimator.fits_worst_case)
    by_slowdown = partialmethod(_by_slowdown, paged=paged)
    return {
        "padding limit": (PADDED, replace(PADDED, max_prefill_padding=1.0), nullcontext),
        "decodes between prefills": (PADDED, PADDED, _replaced(PrefillInterleaving, "may_prefill", lambda *_: True)),
        "peak memory": (little_padded, little_padded, worst_case),
        "overtaking, padded": (little_padded, little_padded, NO_OVERTAKING),
        "overtaking, paged": (little_paged, little_paged, NO_OVERTAKING),
        "prefill gap or 2.6 steps": (PAGED, PAGED, partial(_old_budget, by_slowdown)),
        "prefill gap or all tokens": (PAGED, PAGED, partial(_old_budget, _all_for_prompts)),
        **{
            f"prefill gap {ms} or 250 ms": (replace(PAGED, max_prefill_gap_ms=ms), PAGED, nullcontext) for ms in GAPS_MS
        },
        "several prompts at once": (PAGED, PAGED, ONE_CHUNK),
        "short prompts first": (PAGED, PAGED, _replaced(batcher, "split_budget", _in_order)),
    }


def _figures(limits: BatchLimits, trace: str, paged: StepModel) -> tuple[float, float, float]:
    """Tokens per second; median time to first token and 99th percentile of the longest gaps, in milliseconds."""
    engine = SimulatedEngine(SMOLLM2_TWO_CORES if limits.padded else paged)
    summary = Simulation(limits, engine, TRACES[trace](), CLIENTS).run().summary()
    return summary["tokens_per_second"], summary["ttft_p50_ms"], summary["longest_gap_p99_ms"]


def main(arguments: list[str]) -> int:
    """Measure step times if wanted, and simulate every policy with every trace."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated_policies", description=__doc__)
    parser.add_argument("--step-times", type=Path, default=STEP_TIMES, metavar="FILE", help="of tgis_native")
    parser.add_argument("--measure", action="store_true", help="write that file first, in three minutes")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    args = parser.parse_args(arguments)
    if args.measure:
        args.step_times.write_text(json.dumps(measure(args.cache), indent=1) + "\n")
    paged = step_model(json.loads(args.step_times.read_text()))
    results: dict[str, list[float]] = {}
    print(f"{'':<50}{'tokens/s':>18}{'TTFT p50, ms':>18}{'longest gap p99, ms':>22}")
    for policy, (limits, ablated, replacement) in _policies(paged).items():
        for trace in TRACES:
            kept = _figures(limits, trace, paged)
            with replacement():
                gone = _figures(ablated, trace, paged)
            results[f"{policy}, {trace}"] = [*kept, *gone]
            pairs = "".join(f"{a:>11.0f}{b:>9.0f}" for a, b in zip(kept, gone, strict=True))
            print(f"{policy:<32}{trace:<18}{pairs}", flush=True)
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
