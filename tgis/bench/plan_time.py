"""CPU time that the batcher takes to plan a step: 256 rows run, 1000 requests wait. `python -m tgis.bench.plan_time`.

The last line is JSON: per case p50 and p99 in milliseconds.
"""

import gc
import json
import random
import time
from collections.abc import Callable

from tgis.batcher.batcher import Batcher
from tgis.batcher.granular import Forecast
from tgis.batcher.weights import Limits, MemoryModel
from tgis.messages import Details, Request, Sampling

_RUNNING, _WAITING, _ROUNDS = 256, 1000, 30


def _request(number: int, length: int, new: int) -> Request:
    return Request(number, [1] * length, new, capped=False, sampling=Sampling(), details=Details())


def _running(room: int, *, padded: bool, size: int, max_padding: float = 1.0) -> Batcher:
    """A batcher with 256 rows in the middle of their output, and room for so many more tokens of context."""
    limits = Limits(
        max_batch_size=size,
        memory=MemoryModel.of_tokens(1 << 40),
        prefill_tokens=8192,
        max_padding=max_padding,
        padded=padded,
        max_waiting_tokens=0,
    )
    batcher, draw = Batcher(limits, ()), random.Random(1)
    requests = [_request(n, draw.randint(20, 200), draw.randint(1000, 3000)) for n in range(_RUNNING)]
    batcher.submit(requests, 0.0)
    while batcher.waiting:
        _step(batcher)
    _step(batcher)
    lengths = [(len(row.tokens), row.remaining) for row in batcher.rows]
    batcher._allowance.context = Forecast(lengths, padded, 0).peak() + room
    return batcher


def _step(batcher: Batcher) -> None:
    plan = batcher.plan(0.0)
    assert plan is not None
    batcher.commit(plan, [1] * len(plan.sampled), 0.0)


def _lengths(draw: random.Random) -> tuple[int, int]:
    return draw.randint(50, 900), draw.randint(50, 900)


def _long_lived(draw: random.Random) -> tuple[int, int]:
    return draw.randint(50, 900), draw.randint(3000, 4000)


def _short(draw: random.Random) -> tuple[int, int]:
    return draw.randint(10, 60), draw.randint(10, 60)


def _staircase(draw: random.Random) -> tuple[int, int]:
    """No request is smaller than another in both: none of them tells about the next."""
    length = draw.randint(1, 4000)
    return length, 7001 - length


def _measure(make: Callable[[], Batcher], lengths: Callable[[random.Random], tuple[int, int]]) -> dict[str, float]:
    times, joined = [], 0
    for seed in range(_ROUNDS):
        batcher, draw = make(), random.Random(seed)
        batcher.submit([_request(1000 + n, *lengths(draw)) for n in range(_WAITING)], 0.0)
        gc.collect()
        gc.disable()
        started = time.thread_time()
        plan = batcher.plan(0.0)
        times.append(time.thread_time() - started)
        gc.enable()
        assert plan is not None
        joined += len(plan.rows) if plan.prefill else 0
    times.sort()
    p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
    return {"p50_ms": round(p50 * 1e3, 3), "p99_ms": round(p99 * 1e3, 3), "joined": joined / _ROUNDS}


def main() -> None:
    """Measure all cases."""
    cases: dict[str, tuple[Callable[[], Batcher], Callable[[random.Random], tuple[int, int]]]] = {}
    for kind, padded in (("padded", True), ("unpadded", False)):

        def make(size: int, room: int, padding: float = 1.0, padded: bool = padded) -> Callable[[], Batcher]:
            return lambda: _running(room, padded=padded, size=size, max_padding=padding)

        cases[f"{kind}: batch is full"] = make(_RUNNING, 0), _lengths
        cases[f"{kind}: none fits memory"] = make(2000, 0), _long_lived
        cases[f"{kind}: none fits, none tells"] = make(2000, 0), _staircase
        cases[f"{kind}: all fit, 64 slots"] = make(_RUNNING + 64, 1 << 40), _lengths
        cases[f"{kind}: close to the limit"] = make(2000, 0), _lengths
        cases[f"{kind}: short, close to the limit"] = make(2000, 0), _short
        cases[f"{kind}: all fit, little padding"] = make(2000, 1 << 40, 0.01), _lengths
    results = {}
    for name, (make_one, lengths) in cases.items():
        results[name] = _measure(make_one, lengths)
        r = results[name]
        print(f"{name:<40} p50 {r['p50_ms']:7.3f} ms  p99 {r['p99_ms']:7.3f} ms  joined {r['joined']:6.1f}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
