"""benchmarks.compare: ratios are taken within a pair, since the host may be slower in another."""

import math

from benchmarks.compare import Pair, summarize


def pair(this: float, other: float) -> Pair:
    figures = {"this": this, "other": other}
    return {name: {8: {"output_tokens_per_s": v, "server_cpu_us_per_token": 2 * v}} for name, v in figures.items()}


def test_the_median_is_of_the_ratios_of_pairs() -> None:
    (row,) = summarize([pair(100.0, 100.0), pair(45.0, 50.0), pair(240.0, 200.0)], [8])
    assert row["streams"] == 8
    speed, cpu = row["output_tokens_per_s"], row["server_cpu_us_per_token"]
    assert (speed["this"], speed["other"]) == (100.0, 100.0)
    assert (cpu["this"], cpu["other"]) == (200.0, 200.0)
    assert all(map(math.isclose, speed["ratio"].values(), (1.0, 0.9, 1.2)))
    assert speed["ratio"] == cpu["ratio"]
