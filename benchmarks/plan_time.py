"""CPU time that the batcher takes to plan a step: 256 rows run, 1000 requests wait. `python -m benchmarks.plan_time`.

The last line is JSON: per case p50 and p99 in milliseconds, and how many requests joined.
"""

import gc
import json
import random
import time
from collections.abc import Callable
from typing import Any

from tgis.batcher.batcher import Batcher
from tgis.batcher.granular import PeakEstimator
from tgis.batcher.memory_model import BatchLimits, MemoryModel
from tgis.ipc.messages import LogprobOptions, Request, SamplingParams

_RUNNING, _WAITING, _ROUNDS = 256, 1000, 30
_BLOCK = 16
_SHARED = list(range(4000))  # a beginning that many prompts have

Draw = Callable[[random.Random], tuple[list[int], int]]  # the tokens of a request, and how many it may generate


def _request(number: int, tokens: list[int], new: int) -> Request:
    return Request(
        number,
        tokens,
        new,
        limited_by_context=False,
        sampling_params=SamplingParams(),
        logprob_options=LogprobOptions(),
    )


def _batcher(**limits: Any) -> Batcher:
    """With 256 rows in the middle of their output."""
    values: dict[str, Any] = {
        "max_batch_size": 2000,
        "memory": MemoryModel.from_tokens(1 << 22),
        "prefill_tokens": 8192,
    }
    batcher, draw = Batcher(BatchLimits(**values | limits, max_waiting_tokens=0), ()), random.Random(1)
    tokens = [_own(draw, draw.randint(20, 200)) for _ in range(_RUNNING)]
    batcher.submit([_request(n, some, draw.randint(1000, 3000)) for n, some in enumerate(tokens)], 0.0)
    while batcher.num_waiting or any(not row.decoding for row in batcher.running_seqs):
        _step(batcher)
    _step(batcher)
    return batcher


def _rectangle(room: int, **limits: Any) -> Callable[[], Batcher]:
    """Of an engine without blocks, with room for so many more tokens of context than its rows will ever have."""

    def make() -> Batcher:
        batcher = _batcher(**limits)
        lengths = [(len(row.tokens), row.num_remaining_tokens) for row in batcher.running_seqs]
        batcher._capacity.context_tokens = PeakEstimator(lengths, limits["padded"], 0).peak() + room
        return batcher

    return make


def _paged(room: int, held: tuple[list[int], int, int] | None = None, **limits: Any) -> Callable[[], Batcher]:
    """Of an engine with blocks, so many of them free besides one for each row.

    `held` is a request that came before: its tokens, how many it generates, and the steps since.
    """

    def make() -> Batcher:
        batcher = _batcher(block_size=_BLOCK, prefix_cache=True, **limits)
        if held:
            batcher.submit([_request(999, *held[:2])], 0.0)
            for _ in range(held[2]):
                _step(batcher)
        pager = batcher._block_manager
        assert pager is not None
        promised = sum(
            pager.missing_blocks(row, len(row.tokens) + 1) for row in batcher.running_seqs if not row.decoding
        )
        batcher._capacity.context_tokens = (pager.pool.num_used + promised + batcher.num_running + room) * _BLOCK
        return batcher

    return make


def _step(batcher: Batcher) -> None:
    plan = batcher.plan(0.0)
    assert plan is not None
    batcher.commit(plan, [1] * len(plan.sampled), 0.0)


def _own(draw: random.Random, length: int) -> list[int]:
    """Tokens that nobody else begins with."""
    return [draw.getrandbits(31), *range(length - 1)]


def _lengths(draw: random.Random) -> tuple[list[int], int]:
    return _own(draw, draw.randint(50, 900)), draw.randint(50, 900)


def _long_lived(draw: random.Random) -> tuple[list[int], int]:
    return _own(draw, draw.randint(50, 900)), draw.randint(3000, 4000)


def _short(draw: random.Random) -> tuple[list[int], int]:
    return _own(draw, draw.randint(10, 60)), draw.randint(10, 60)


def _staircase(draw: random.Random) -> tuple[list[int], int]:
    """No request is smaller than another in both: none of them tells about the next."""
    length = draw.randint(1, 4000)
    return _own(draw, length), 7001 - length


def _long(draw: random.Random) -> tuple[list[int], int]:
    return _own(draw, 4000), 100


def _alike(draw: random.Random) -> tuple[list[int], int]:
    return _SHARED + _own(draw, 1000), 100


def _measure(make: Callable[[], Batcher], requests: Draw) -> dict[str, float]:
    rounds = [_round(make(), requests, random.Random(seed)) for seed in range(_ROUNDS)]
    times = sorted(seconds for seconds, _ in rounds)
    p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    joined = sum(count for _, count in rounds) / _ROUNDS
    return {"p50_ms": round(p50 * 1e3, 3), "p99_ms": round(p99 * 1e3, 3), "joined": joined}


def _round(batcher: Batcher, requests: Draw, draw: random.Random) -> tuple[float, int]:
    """Seconds of one plan, and how many joined; what it made is freed afterwards."""
    batcher.submit([_request(1000 + n, *requests(draw)) for n in range(_WAITING)], 0.0)
    gc.collect()
    gc.disable()
    started = time.thread_time()
    plan = batcher.plan(0.0)
    seconds = time.thread_time() - started
    gc.enable()
    assert plan is not None
    return seconds, _WAITING - batcher.num_waiting


def _cases() -> dict[str, tuple[Callable[[], Batcher], Draw]]:
    cases: dict[str, tuple[Callable[[], Batcher], Draw]] = {}
    for kind, padded in (("padded", True), ("unpadded", False)):
        cases |= {
            f"{kind}: batch is full": (_rectangle(0, padded=padded, max_batch_size=_RUNNING), _lengths),
            f"{kind}: none fits memory": (_rectangle(0, padded=padded), _long_lived),
            f"{kind}: none fits, none tells": (_rectangle(0, padded=padded), _staircase),
            f"{kind}: all fit, 64 slots": (_rectangle(1 << 40, padded=padded, max_batch_size=_RUNNING + 64), _lengths),
            f"{kind}: close to the limit": (_rectangle(0, padded=padded), _lengths),
            f"{kind}: short, close to the limit": (_rectangle(0, padded=padded), _short),
            f"{kind}: all fit, little padding": (_rectangle(1 << 40, padded=padded, max_padding=0.01), _lengths),
        }
    return cases | {
        "paged: batch is full": (_paged(0, max_batch_size=_RUNNING), _long),
        "paged: none fits memory": (_paged(50), _long),
        "paged: none fits, beginnings cached": (_paged(50, (_SHARED, 2, 20)), _alike),
        "paged: none fits, beginnings in use": (_paged(50, (_SHARED, 1000, 20)), _alike),
        "paged: all await a beginning": (_paged(1 << 16, (_SHARED * 5, 2, 3)), _alike),
        "paged: all fit, 64 slots": (_paged(1 << 16, max_batch_size=_RUNNING + 64), _lengths),
    }


def main() -> None:
    """Measure all cases."""
    results = {}
    for name, case in _cases().items():
        results[name] = _measure(*case)
        r = results[name]
        print(f"{name:<40} p50 {r['p50_ms']:7.3f} ms  p99 {r['p99_ms']:7.3f} ms  joined {r['joined']:6.1f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
