"""`tgis simulate`: figures of traces computed by hand, the traces themselves, the output."""

import json
from pathlib import Path

import pytest

from tgis.__main__ import run
from tgis.batcher.capacity import BatchLimits
from tgis.bench.simulate import (
    SMOLLM2_TWO_CORES,
    SimulatedEngine,
    Simulation,
    TraceRequest,
    bimodal_trace,
    lognormal_trace,
    read_trace,
)
from tgis.engines.fake import StepModel
from tgis.errors import OptionError

MODEL = StepModel(padded=True, step_seconds=1.0, row_seconds=0.1, prefill_token_seconds=0.01)
BOUNDS = BatchLimits(4, 10**6, 10**6, 1.0, padded=True, max_waiting_tokens=0)
COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_two_requests_computed_by_hand() -> None:
    outcome = Simulation(BOUNDS, SimulatedEngine(MODEL), [TraceRequest(0.0, 10, 3), TraceRequest(0.0, 20, 2)]).run()
    assert outcome.seconds == pytest.approx(1.4 + 1.2 + 1.1)  # a prefill of 2 x 20, decodes of two sequences and of one
    assert outcome.tokens == 5
    assert outcome.times("ttft") == pytest.approx([1.4, 1.4])
    assert outcome.times("tpot") == pytest.approx([1.15, 1.2])  # by request
    summary = outcome.summary()
    assert summary["prefill_padding"] == 0.25
    assert summary["decode_padding"] == pytest.approx(1 - (11 + 21 + 12) / (42 + 12), abs=1e-3)
    assert summary["rows_per_step"] == 1.5


def test_one_client_sends_one_request_after_the_other() -> None:
    outcome = Simulation(BOUNDS, SimulatedEngine(MODEL), [TraceRequest(0.0, 10, 2)] * 3, clients=1).run()
    assert outcome.seconds == pytest.approx(3 * (1.1 + 1.1))
    assert outcome.times("ttft") == pytest.approx([1.1] * 3)


def test_late_requests_find_an_idle_server() -> None:
    outcome = Simulation(BOUNDS, SimulatedEngine(MODEL), [TraceRequest(0.0, 10, 1), TraceRequest(50.0, 10, 1)]).run()
    assert outcome.seconds == pytest.approx(51.1)
    assert outcome.times("ttft") == pytest.approx([1.1, 1.1])


def test_synthetic_traces() -> None:
    jobs = list(lognormal_trace(2000, 5.0, seed=3))
    assert jobs == list(lognormal_trace(2000, 5.0, seed=3))
    assert sorted(job.prompt_tokens for job in jobs)[1000] == pytest.approx(60, rel=0.1)
    assert jobs[-1].arrival_time == pytest.approx(400, rel=0.1)
    long = [job for job in bimodal_trace(2000, 5.0, seed=3) if job.prompt_tokens == 1024]
    assert len(long) == pytest.approx(200, rel=0.2)


def test_azure_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:04.5000000,396,109\n"
        "2023-11-16 18:17:03.0000000,879,55\n"
    )
    assert read_trace(path) == [TraceRequest(0.0, 879, 55), TraceRequest(1.5, 396, 109)]


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", f"{COLUMNS}soon,1,1\n", f"{COLUMNS}nan,1,1\n", "TIMESTAMP\xff"],
)
def test_an_invalid_trace_is_one_error_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(OptionError, match="is no trace"):
        read_trace(path)


@pytest.mark.parametrize(
    "options",
    [
        ["--clients", "8"],
        ["--engine", "flat", "--trace", "bimodal", "--max-batch-size", "8"],
        ["--engine", "chunked", "--trace", "bimodal", "--max-batch-size", "8"],
        ["--engine", "encoder-decoder", "--trace", "bimodal", "--prefill-tokens", "100"],
    ],
)
def test_the_command_writes_a_table_and_json(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--requests", "20", *options]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert [line.split()[0] for line in table] == list(summary)
    assert summary["requests"] == 20


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--requests=0", "argument --requests: '0' must be a whole number from 1"),
        ("--rate=0", "argument --rate: '0' must be a number above 0"),
        ("--step-ms=nan", "argument --step-ms: 'nan' must be a number from 0"),
        ("--weight-limit=9", "--weight-limit=9 is too low for a request of"),
    ],
)
def test_what_cannot_be_simulated_is_one_error_line(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--engine", "chunked", option]) == 2
    assert capsys.readouterr().err.startswith(f"tgis: {said}")


def test_copies_of_prompts_are_guessed() -> None:
    bounds = BatchLimits(4, 10**6, 512, 1.0, padded=False, block_size=16, proposed_tokens=15)
    jobs = [TraceRequest(0.0, 100, 400)] * 3
    seconds = [Simulation(bounds, SimulatedEngine(SMOLLM2_TWO_CORES, chance), jobs).run().seconds for chance in (0, 1)]
    assert 3 < seconds[0] / seconds[1] < 16
