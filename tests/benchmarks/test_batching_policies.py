"""The batcher's policies beside plain continuous batching, simulated; and the benchmark that measures them."""

import json
from pathlib import Path

import pytest

from benchmarks import batching_policies
from benchmarks.batching_policies import POLICIES, TimedEngine, engine_options, load_warm_engine
from tgis.batcher.capacity import BatchLimits
from tgis.bench.simulate import (
    SMOLLM2_TWO_CORES,
    SimulatedEngine,
    Simulation,
    TraceRequest,
    bimodal_trace,
    lognormal_trace,
)


def bounds(size: int) -> BatchLimits:
    return BatchLimits(size, 1 << 30, 512, 0.2, padded=True)


def figures(policy: str, size: int, jobs: list[TraceRequest], clients: int) -> dict[str, float]:
    outcome = Simulation(POLICIES[policy](bounds(size)), SimulatedEngine(SMOLLM2_TWO_CORES), jobs, clients).run()
    assert policy != "plain" or outcome.counters.queue_jumps == 0
    return outcome.summary()


@pytest.mark.parametrize("size", [12, 64])
@pytest.mark.parametrize("clients", [4, 64])
@pytest.mark.parametrize("policy", ["unpadded", "plain"])
def test_throughput_is_no_lower_than_plain_continuous_batching(policy: str, clients: int, size: int) -> None:
    jobs = list(lognormal_trace(300, 1.0, seed=1))
    got, base = figures("default", size, jobs, clients), figures(policy, size, jobs, clients)
    assert got["tokens_per_second"] >= 0.98 * base["tokens_per_second"]
    assert got["prefill_padding"] <= 0.5 * base["prefill_padding"]


def test_short_requests_do_not_wait_for_long_ones() -> None:
    jobs = list(bimodal_trace(600, 1.0, seed=1))
    got, base = figures("default", 64, jobs, 64), figures("plain", 64, jobs, 64)
    assert got["tokens_per_second"] >= 1.3 * base["tokens_per_second"]
    assert got["ttft_p99_ms"] <= 0.5 * base["ttft_p99_ms"]
    assert got["prefill_padding"] < 0.01


def test_a_real_engine_finishes_every_request(glassllm_dir: Path) -> None:
    engine, limits = load_warm_engine(engine_options("hf_transformers", glassllm_dir, "float32", 4))
    jobs = [TraceRequest(0.0, 3 + n % 7, 1 + n % 5) for n in range(12)]
    for policy in POLICIES.values():
        outcome = Simulation(policy(limits), TimedEngine(engine), jobs, clients=6).run()
        assert outcome.tokens == sum(job.output_tokens for job in jobs)
        assert len(outcome.times("ttft")) == 12
        assert 0 < min(outcome.times("ttft")) <= outcome.seconds


def test_the_command_prints_a_table_and_json(cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--engine", "fake", "--sizes", "4", "--requests", "20", "--clients", "8", "--cache", str(cache_dir)]
    assert batching_policies.main(argv) == 0
    *table, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert [line.split()[:3] for line in table[1:-1]] == [
        [trace, "4", policy] for trace in ("lognormal", "bimodal") for policy in POLICIES
    ]
    assert report["fake bimodal 4"]["plain"]["requests"] == 20
