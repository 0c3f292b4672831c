"""benchmarks.simulation: figures of traces computed by hand, and the traces themselves."""

import pytest

from benchmarks.simulation import (
    SMOLLM2_TWO_CORES,
    SimulatedEngine,
    Simulation,
    TraceRequest,
    bimodal_trace,
    lognormal_trace,
)
from tgis.batcher.capacity import BatchLimits
from tgis.engines.fake import StepModel

MODEL = StepModel(padded=True, step_seconds=1.0, row_seconds=0.1, prefill_token_seconds=0.01)
BOUNDS = BatchLimits(4, 10**6, 10**6, 1.0, padded=True, max_waiting_tokens=0)


def test_two_requests_computed_by_hand() -> None:
    outcome = Simulation(BOUNDS, SimulatedEngine(MODEL), [TraceRequest(0.0, 10, 3), TraceRequest(0.0, 20, 2)]).run()
    assert outcome.seconds == pytest.approx(1.4 + 1.2 + 1.1)  # a prefill of 2 x 20, decodes of two sequences and of one
    assert outcome.tokens == 5
    assert outcome.ttft == pytest.approx([1.4, 1.4])
    assert outcome.tpot == pytest.approx([1.2, 1.15])
    summary = outcome.summary()
    assert summary["prefill_padding"] == 0.25
    assert summary["decode_padding"] == pytest.approx(1 - (11 + 21 + 12) / (42 + 12), abs=1e-3)
    assert summary["rows_per_step"] == 1.5


def test_one_client_sends_one_request_after_the_other() -> None:
    outcome = Simulation(BOUNDS, SimulatedEngine(MODEL), [TraceRequest(0.0, 10, 2)] * 3, clients=1).run()
    assert outcome.seconds == pytest.approx(3 * (1.1 + 1.1))
    assert outcome.ttft == pytest.approx([1.1] * 3)


def test_late_requests_find_an_idle_server() -> None:
    outcome = Simulation(BOUNDS, SimulatedEngine(MODEL), [TraceRequest(0.0, 10, 1), TraceRequest(50.0, 10, 1)]).run()
    assert outcome.seconds == pytest.approx(51.1)
    assert outcome.ttft == pytest.approx([1.1, 1.1])


@pytest.mark.parametrize(("seqs", "milliseconds"), [(1, 16.9), (8, 21.4), (32, 40.7), (64, 70.0)])
def test_the_step_times_of_two_cores_are_those_measured(seqs: int, milliseconds: float) -> None:
    step = SMOLLM2_TWO_CORES.step_seconds + seqs * (
        SMOLLM2_TWO_CORES.row_seconds + 150 * SMOLLM2_TWO_CORES.context_seconds
    )
    assert 1e3 * step == pytest.approx(milliseconds, rel=0.06)


def test_synthetic_traces() -> None:
    jobs = list(lognormal_trace(2000, 5.0, seed=3))
    assert jobs == list(lognormal_trace(2000, 5.0, seed=3))
    assert sorted(job.prompt_tokens for job in jobs)[1000] == pytest.approx(60, rel=0.1)
    assert jobs[-1].arrival_time == pytest.approx(400, rel=0.1)
    long = [job for job in bimodal_trace(2000, 5.0, seed=3) if job.prompt_tokens == 1024]
    assert len(long) == pytest.approx(200, rel=0.2)
