"""Requests, limits and steps for tests of the batcher; the caller passes the time."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cpu_kernels import CACHE_DIR, CPU_ISA

from tgis.batcher.batcher import Batcher
from tgis.batcher.block_pool import BlockPool
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, StopReason

EOS = 99


def limits(weight: int = 1000, **changes: Any) -> BatchLimits:
    values: dict[str, Any] = {
        "max_batch_size": 4,
        "token_capacity": weight,
        "prefill_tokens": 64,
        "padded": True,
        "max_waiting_tokens": 0,
    }
    return BatchLimits(**(values | changes))


def engine_options(model: Path, max_batch_size: int = 4, **changes: Any) -> EngineOptions:
    """The padded engine in float32 on one thread, with limits that no test reaches."""
    values: dict[str, Any] = {
        "model_path": str(model),
        "max_batch_size": max_batch_size,
        "engine": "hf_transformers",
        "dtype": "float32",
        "eos_ids": (2,),
        "max_sequence_length": 256,
        "max_prefill_padding": 1.0,
        "max_waiting_tokens": 0,
        "batch_safety_margin": 20,
        "cuda_memory_fraction": 1.0,
        "num_threads": 1,
        "log_level": "info",
        "json_output": False,
        "cache_dir": CACHE_DIR,
        "cpu_isa": CPU_ISA,
    }
    return EngineOptions(**values | changes)


def request(
    request_id: int,
    length: int = 3,
    max_new: int = 5,
    *,
    capped: bool = False,
    deadline: float | None = None,
    min_new: int = 0,
    client: bytes = b"",
) -> Request:
    sampling = SamplingParams(min_new_tokens=min_new)
    tokens = list(range(1, length + 1))
    return Request(request_id, tokens, max_new, capped, sampling, LogprobOptions(), deadline, client=client)


def queued(requests: Iterable[Request], weight: int = 1000, **changes: Any) -> Batcher:
    """A batcher with these limits, and the inputs of one call in its queue."""
    batcher = Batcher(limits(weight, **changes), {EOS})
    batcher.submit(requests, 0.0)
    return batcher


def ids(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.id for seq in seqs]


def next_plan(batcher: Batcher, now: float = 0.0) -> StepPlan:
    plan = batcher.plan(now)
    assert plan.seqs
    return plan


def busy(batcher: Batcher) -> bool:
    """Whether any request waits or runs."""
    return len(batcher.waiting) + len(batcher.running) > 0


def preempted(plan: StepPlan) -> list[Sequence]:
    """Sequences that lost their blocks, if no step has failed."""
    return [seq for seq in plan.to_release if seq.stop_reason is StopReason.NOT_FINISHED]


def commit(
    batcher: Batcher,
    plan: StepPlan,
    tokens: list[list[int]],
    now: float = 0.0,
    verified: Mapping[int, list[int]] = {},
) -> list[Sequence]:
    """Commit a step, and return the sequences that it ended."""
    batcher.commit(plan, tokens, now, verified)
    return [seq for seq in plan.sampled if seq.finished]


def run_step(batcher: Batcher, token: int = 7, now: float = 0.0) -> tuple[StepPlan, list[Sequence]]:
    plan = next_plan(batcher, now)
    return plan, commit(batcher, plan, [[token]] * len(plan.sampled), now)


def next_prefill(batcher: Batcher) -> StepPlan:
    """Run steps until the plan is a prefill, and return that plan."""
    while not (plan := next_plan(batcher)).has_prefill:
        batcher.commit(plan, [[7]] * len(plan.sampled), 0.0)
    return plan


def pool_of(batcher: Batcher) -> BlockPool:
    assert batcher._block_manager is not None
    return batcher._block_manager.pool


def check_pool(pool: BlockPool) -> None:
    """Assert that every block is in one state only, and that hashes lead back to their blocks."""
    free, evictable, used = set(pool._free_blocks), set(pool._evictable), set(pool._ref_counts)
    assert len(free) == len(pool._free_blocks)
    assert len(free) + len(evictable) + len(used) == pool.num_touched <= pool.num_blocks
    assert free | evictable | used == set(range(pool.num_touched))
    assert min(pool._ref_counts.values(), default=1) > 0
    assert evictable <= set(pool._hashes) <= evictable | used
    assert {block_hash: block for block, block_hash in pool._hashes.items()} == pool._cached_blocks
