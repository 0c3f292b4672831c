"""`python -m benchmarks.gpu_model`: predicted throughput on an H200, by a model of step times and the real batcher.

Predicts what `make bench-gpu` measures for Llama 3.1 8B in bfloat16, relative to vLLM 0.24 on the same machine; it
shows without a GPU where time goes and what a policy is worth. The constants are counted bytes over measured bandwidth,
and estimated launches. The last line is JSON.
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any

from benchmarks.engines import Job, run_jobs
from benchmarks.gpu import SHAPES, mixed_jobs
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.bench.summary import summarize

BYTES_PER_SECOND = 3.75e12  # bandwidth of long reads
KV_BYTES = 2 * 32 * 8 * 128 * 2  # per token, all layers
PROMPT_TOKENS_PER_SECOND = 42_500
HOST_SECONDS = 5e-3  # CPU work of a pass with prompts: planning, batch, launches of sampling
VLLM = (203, 1454, 6612, 9714, 22_481, 10_478)  # tokens/s of the loads of `benchmarks.gpu`, the mixed one last
LAYERS, HEADS, PROGRAMS_AT_ONCE = 32, 32, 132 * 16  # programs of four warps that a GPU runs at once
CAPTURED_KERNEL, KERNEL, WAVE = (
    1.5e-6,
    3e-6,
    1e-6,
)  # seconds: a small kernel in a graph, outside of one, a wave of idle programs
MAX_ATTENDED_TOKENS = 1 << 16  # by all prompt tokens of a captured step
LIMITS = BatchLimits(256, 900_000, 8192, block_size=16, lookahead=1, max_prefill_gap_ms=150)  # the defaults on CUDA


@dataclass(frozen=True, slots=True)
class GpuModel:
    """An engine that computes nothing: its step times follow from the batch."""

    decode_rows: tuple[tuple[int, float], ...]  # (batch size, seconds of a captured step's weights and activations)
    layer_kernels: int  # kernels of a layer in a captured step
    step_kernels: int  # kernels outside of the graph: inputs, greedy sampling, results
    combines_all_rows: bool  # attention's second pass runs for all rows, not only for those with several splits
    pass_seconds: float  # lower bound of a pass that is not captured: its launches
    captures_prompts: bool  # short prompts are computed by captured steps

    def step(self, plan: StepPlan) -> tuple[list[list[int]], float]:
        return [[0]] * len(plan.sampled), self._seconds(plan)

    def with_lora(self) -> "GpuModel":
        """The same model where every pass has LoRA adapters."""
        kernels, seconds = self.layer_kernels + LORA_KERNELS, self.pass_seconds + LORA_PASS
        return replace(self, layer_kernels=kernels, pass_seconds=seconds)

    def release(self, seqs: Iterable[Sequence]) -> None:
        """There is nothing to release."""

    def _seconds(self, plan: StepPlan) -> float:
        """Seconds of a step: its decodes are launched first and run while its prompts are prepared."""
        decodes = [len(seq.tokens) for seq in plan.seqs if seq.decoding]
        decode_seconds = self._captured_seconds(len(decodes), sum(decodes)) if decodes else 0.0
        work = zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        prompts = [(count, len(seq.tokens)) for seq, count in work if not seq.decoding]
        return decode_seconds if not prompts else self._prompt_seconds(prompts, decode_seconds)

    def _prompt_seconds(self, prompts: list[tuple[int, int]], decode_seconds: float) -> float:
        tokens, attended = sum(count for count, _ in prompts), sum(count * length for count, length in prompts)
        ready = max(HOST_SECONDS, decode_seconds)
        most = self.decode_rows[-1][0]
        if self.captures_prompts and tokens <= most and attended <= MAX_ATTENDED_TOKENS:
            return ready + self._captured_seconds(tokens, attended)
        products = max(self._interpolate(min(tokens, most)), tokens / PROMPT_TOKENS_PER_SECOND)
        return max(ready + products, HOST_SECONDS + self.pass_seconds)

    def _captured_seconds(self, rows: int, attended: int) -> float:
        return attended * KV_BYTES / BYTES_PER_SECOND + self.decode_seconds(rows)

    def decode_seconds(self, rows: int) -> float:
        """Seconds of a captured step, without reading the KV cache."""
        combined = rows if self.combines_all_rows else min(rows, 66)  # spare splits: 4 programs a multiprocessor
        waves = LAYERS * ceil(combined * HEADS / PROGRAMS_AT_ONCE) * WAVE
        kernels = LAYERS * self.layer_kernels * CAPTURED_KERNEL + self.step_kernels * KERNEL
        return self._interpolate(rows) + waves + kernels

    def _interpolate(self, rows: int) -> float:
        for (low, early), (high, late) in pairwise(self.decode_rows):
            if rows <= high:
                return early + (late - early) * (rows - low) / (high - low)
        raise ValueError(f"more than {self.decode_rows[-1][0]} rows")


BYTES = (1, 4.0e-3), (64, 4.4e-3), (256, 7.9e-3)  # weights and activations read at the bandwidth, products
UNFUSED = (1, 4.26e-3), (64, 4.96e-3), (256, 9.26e-3)  # with the activations of every small operator
EAGER = GpuModel(UNFUSED, 47, 28, combines_all_rows=False, pass_seconds=30e-3, captures_prompts=True)
COMPILED = GpuModel(BYTES, 10, 28, combines_all_rows=False, pass_seconds=9.5e-3, captures_prompts=True)
C51A0FB: dict[str, Any] = {"step_kernels": 45, "combines_all_rows": True, "captures_prompts": False}  # that revision
PIECEWISE_PASS = 3e-3  # launches of a pass with piecewise CUDA graphs
LORA_KERNELS, LORA_PASS = 28, 7e-3  # four kernels for each of seven linear layers; their launches in a pass, seconds
MODELS = {
    "captured, c51a0fb": replace(EAGER, layer_kernels=48, **C51A0FB),
    "captured": EAGER,
    "captured and compiled, c51a0fb": replace(COMPILED, layer_kernels=11, **C51A0FB),
    "captured and compiled": COMPILED,
    "with LoRA, 95664c4": replace(EAGER, captures_prompts=False).with_lora(),
    "with LoRA": COMPILED.with_lora(),
    "with top_p, 95664c4": replace(COMPILED, captures_prompts=False, step_kernels=28 + 129),
    "with top_p": replace(COMPILED, step_kernels=28 + 18),
    "captured, piecewise": replace(EAGER, pass_seconds=PIECEWISE_PASS),
    "captured and compiled, piecewise": replace(COMPILED, pass_seconds=PIECEWISE_PASS),
    "with LoRA, piecewise": replace(COMPILED.with_lora(), pass_seconds=PIECEWISE_PASS),
}


def ratios(model: GpuModel, limits: BatchLimits = LIMITS) -> list[float]:
    """Tokens/s relative to vLLM's, by load."""
    shape = SHAPES["llama-3.1-8b"]
    loads = [[Job(new, out)] * rows for rows, new, out in shape.alone]
    loads.append(list(mixed_jobs(shape)))
    speeds = [summarize(run_jobs(limits, model, jobs), 0.0).output_tokens_per_s for jobs in loads]
    return [round(speed / peer, 2) for speed, peer in zip(speeds, VLLM, strict=True)]


def main() -> int:
    figures = {name: ratios(model) for name, model in MODELS.items()}
    for name, row in figures.items():
        print(f"{name:<32}", *(f"{ratio:>6.2f}" for ratio in row))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
