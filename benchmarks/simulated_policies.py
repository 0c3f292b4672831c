"""`python -m benchmarks.simulated_policies`: what each policy of the batcher gains, in simulations with and without it.

The step times are those of SmolLM2 in bfloat16 on two cores: of hf_transformers for padded batches, of tgis_native for
KV blocks. 64 clients in a closed loop; memory for one million tokens of context, or 6000 where a policy is about
memory. The last line is JSON: for each policy and trace the figures with it, then without it.
"""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

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
PAGED_TWO_CORES = StepModel(
    block_size=16, step_seconds=0.010, row_seconds=0.0006, context_seconds=1.2e-6, prefill_token_seconds=0.00027
)
PADDED = BatchLimits(64, 10**6, 512, max_prefill_padding=0.2, padded=True)
PAGED = BatchLimits(64, 10**6, 512, block_size=16, max_slowdown=1.8)
SHORT = 6000


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


def _in_order(seqs: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Replacement of `split_budget` that gives the whole budget to the oldest prompts."""
    scheduled = []
    for seq in seqs:
        count = 1 if seq.decoding else min(seq.num_uncomputed_tokens, budget)
        budget -= 0 if seq.decoding else count
        scheduled += [(seq, count)] if count else []
    return scheduled


def _all_for_prompts(_: PrefillBudget, seqs: list[Sequence], max_tokens: int) -> int:
    return max(max_tokens - sum(seq.decoding for seq in seqs), 1)


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(owner, name, value)


NO_OVERTAKING = _replaced(admission, "MAX_OVERTAKERS", -1)
# limits with the policy, limits without it, and the patch that removes its code
POLICIES: dict[str, tuple[BatchLimits, BatchLimits, Callable[[], AbstractContextManager[Any]]]] = {
    "padding limit": (PADDED, replace(PADDED, max_prefill_padding=1.0), nullcontext),
    "decodes between prefills": (PADDED, PADDED, _replaced(PrefillInterleaving, "may_prefill", lambda *_: True)),
    "peak memory": (
        replace(PADDED, token_capacity=SHORT),
        replace(PADDED, token_capacity=SHORT),
        _replaced(PeakEstimator, "fits", PeakEstimator.fits_worst_case),
    ),
    "overtaking, padded": (replace(PADDED, token_capacity=SHORT), replace(PADDED, token_capacity=SHORT), NO_OVERTAKING),
    "overtaking, paged": (replace(PAGED, token_capacity=SHORT), replace(PAGED, token_capacity=SHORT), NO_OVERTAKING),
    "prefill budget": (PAGED, PAGED, _replaced(PrefillBudget, "budget", _all_for_prompts)),
    "short prompts first": (PAGED, PAGED, _replaced(batcher, "split_budget", _in_order)),
}


def _figures(limits: BatchLimits, trace: str) -> tuple[float, float, float]:
    """Tokens per second; median time to first token and 99th percentile of the longest gaps, in milliseconds."""
    engine = SimulatedEngine(SMOLLM2_TWO_CORES if limits.padded else PAGED_TWO_CORES)
    summary = Simulation(limits, engine, TRACES[trace](), CLIENTS).run().summary()
    return summary["tokens_per_second"], summary["ttft_p50_ms"], summary["longest_gap_p99_ms"]


def main() -> None:
    results: dict[str, list[float]] = {}
    print(f"{'':<50}{'tokens/s':>18}{'TTFT p50, ms':>18}{'longest gap p99, ms':>22}")
    for policy, (limits, ablated, replacement) in POLICIES.items():
        for trace in TRACES:
            kept = _figures(limits, trace)
            with replacement():
                gone = _figures(ablated, trace)
            results[f"{policy}, {trace}"] = [*kept, *gone]
            pairs = "".join(f"{a:>11.0f}{b:>9.0f}" for a, b in zip(kept, gone, strict=True))
            print(f"{policy:<32}{trace:<18}{pairs}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
