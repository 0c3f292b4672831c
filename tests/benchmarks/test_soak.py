"""The soak test: what it counts as a problem, a short run, and the two minutes of `make test-all`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from repository import REPOSITORY
from scraped_metrics import make_metrics

from benchmarks.soak import reconcile
from benchmarks.soak.cases import Answer, difference
from benchmarks.soak.client_log import ClientLog
from benchmarks.soak.memory import compute_trend
from tgis.frontend.calls import CallKind
from tgis.frontend.metric_families import FailureReason
from tgis.frontend.metrics import Metrics
from tgis.ipc.messages import StepStats
from tgis.ipc.request import StopReason
from tgis.pb import generation_pb2 as pb

EXPECTED = Answer(
    "one two", ["▁one", "▁t", "w", "o-o"], pb.STOP_SEQUENCE, ["", "one", "one", "one t", "one two"], "one two-ooo"
)


@pytest.mark.parametrize(
    ("got", "right"),
    [
        (Answer("one two", EXPECTED.tokens, pb.STOP_SEQUENCE), True),
        (Answer("one", EXPECTED.tokens[:2], pb.TIME_LIMIT), True),
        (Answer("one t", EXPECTED.tokens[:2], pb.TIME_LIMIT), True),  # text held back is sent at the end
        (Answer("one two-o", EXPECTED.tokens, pb.TIME_LIMIT), True),  # too late for the stop sequence
        (Answer("", [], pb.TIME_LIMIT), True),
        (Answer("", EXPECTED.tokens[:1], pb.NOT_FINISHED), True),
        (Answer("one", EXPECTED.tokens[:2], pb.NOT_FINISHED), True),
        (Answer("one", EXPECTED.tokens[:2], pb.STOP_SEQUENCE), False),
        (Answer("one two", EXPECTED.tokens, pb.MAX_TOKENS), False),
        (Answer("one twO", EXPECTED.tokens, pb.STOP_SEQUENCE), False),
        (Answer("one two", ["▁one", "▁t", "w", "O-o"], pb.STOP_SEQUENCE), False),
        (Answer("one two", ["▁one", "▁T"], pb.TIME_LIMIT), False),
        (Answer("one two-O", EXPECTED.tokens, pb.TIME_LIMIT), False),
        (Answer("one two-o", EXPECTED.tokens, pb.NOT_FINISHED), False),
        (Answer("one three", EXPECTED.tokens[:2], pb.TIME_LIMIT), False),
        (Answer("on", EXPECTED.tokens[:2], pb.TIME_LIMIT), False),  # shorter than the text of two tokens
        (Answer("two", EXPECTED.tokens[:2], pb.NOT_FINISHED), False),
    ],
)
def test_equal_answers_and_prefixes_are_right_and_no_others(got: Answer, right: bool) -> None:
    assert (difference(EXPECTED, got) == "") == right


STEP = StepStats(True, 1, 0, 3, 0.1, 0.1, 0, 0, 0, concatenated=False, num_requeued=0, first_scheduled={})


def succeed(server: Metrics, kind: CallKind, reason: StopReason, tokens: int) -> None:
    server.requests.success.labels(reason.name, kind).inc()
    server.requests.generated_tokens.observe(tokens)
    server.step_succeeded(STEP, [[7] * tokens], 0.0, {})


def make_calls(server: Metrics, log: ClientLog) -> None:
    """A unary call, a refused batch, a cancelled stream, and a batch that may not have arrived."""
    for kind, inputs in ((CallKind.SINGLE, 1), (CallKind.BATCH, 3), (CallKind.STREAM, 1), (CallKind.BATCH, 2)):
        server.request_started(kind, inputs)
    succeed(server, CallKind.SINGLE, StopReason.EOS_TOKEN, 5)
    server.request_failed(FailureReason.VALIDATION)
    server.request_failed(FailureReason.CANCELLED)
    server.request_failed(FailureReason.CANCELLED)
    succeed(server, CallKind.BATCH, StopReason.MAX_TOKENS, 7)
    log.record_call("single", 1)
    log.record_end("single", "EOS_TOKEN", 5)
    log.record_refused("INVALID_ARGUMENT", "batch", 3)
    log.record_call("stream", 1)
    log.abandoned["stream"] += 1
    log.record_uncertain("batch", 2)


def discrepancies_after(change: Callable[[Metrics, ClientLog], object]) -> list[str]:
    """The discrepancies after these calls and one change."""
    server, log = make_metrics(), ClientLog()
    before = reconcile.parse_metrics(server.scrape().decode())
    make_calls(server, log)
    change(server, log)
    return list(reconcile.discrepancies(before, reconcile.parse_metrics(server.scrape().decode()), log))


def test_matching_counters_reconcile() -> None:
    assert discrepancies_after(lambda server, log: None) == []
    assert discrepancies_after(lambda server, log: server.tokenize.count.inc()) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda server, log: server.request_started(CallKind.STREAM, 1), "stream calls"),
        (lambda server, log: log.record_call("single", 0), "single calls"),
        (lambda server, log: log.record_call("batch", 3), "inputs"),
        (lambda server, log: server.request_failed(FailureReason.CANCELLED), "ends of inputs"),
        (lambda server, log: succeed(server, CallKind.STREAM, StopReason.MAX_TOKENS, 1), "ends of inputs"),
        (
            lambda server, log: succeed(server, CallKind.SINGLE, StopReason.EOS_TOKEN, 1),
            "single inputs with EOS_TOKEN",
        ),
        (lambda server, log: server.request_failed(FailureReason.GENERATION), "failures of kind generate"),
        (lambda server, log: server.request_failed(FailureReason.VALIDATION), "failures of kind validation"),
        (lambda server, log: log.record_end("stream", "MAX_TOKENS", 0), "expired inputs"),
        (lambda server, log: log.record_end("single", "MAX_TOKENS", 100), "tokens"),
        (lambda server, log: server.batches.discarded_tokens.inc(8), "tokens in answers"),
    ],
)
def test_discrepancies_are_found(change: Callable[[Metrics, ClientLog], object], what: str) -> None:
    assert [text for text in discrepancies_after(change) if text.startswith(f"{what}: the server counted")]


def grown(minutes: int, size: Callable[[float], float]) -> str:
    return compute_trend([(second, int(1e8 * size(second / 60))) for second in range(60 * minutes + 1)]).problem


def test_memory_that_levels_off_is_accepted() -> None:
    assert grown(15, lambda minute: 1.0) == ""
    assert grown(15, lambda minute: 1 + 0.2 * min(minute / 4, 1)) == ""  # all at the start
    assert grown(15, lambda minute: 1 + 0.2 * (1 - 0.8**minute)) == ""  # ever slower
    assert grown(15, lambda minute: 1.5 if int(60 * minute) % 7 == 0 else 1.0) == ""  # peaks
    assert grown(5, lambda minute: 1.5**minute) == ""  # too short to tell


def test_growing_memory_is_a_problem() -> None:
    assert "grows by 1.50% a minute" in grown(15, lambda minute: 1.015**minute)
    assert "does not level off: 0.50% a minute, then 0.50%" in grown(15, lambda minute: 1.005**minute)
    assert "does not level off: 0.00% a minute, then 0.8" in grown(15, lambda minute: 1.01 ** max(minute - 11, 0))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("options", "compared"), [("--engine fake --minutes 0.05 --in-flight 16", 10), ("--minutes 2", 100)]
)
@pytest.mark.usefixtures("glassllm_dir")
def test_a_soak(options: str, compared: int, cache_dir: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--cache", str(cache_dir), *options.split()]
    done = subprocess.run(command, cwd=REPOSITORY, check=False, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["problems"], done.returncode) == ([], 0)
    assert report["calls"].keys() == {"single", "stream", "batch"}  # how many is the speed of the machine
    assert report["refused"]
    assert report["compared"] > compared
    if "fake" not in options:
        assert {"MAX_TOKENS", "STOP_SEQUENCE", "TIME_LIMIT"} <= report["ends"].keys()
        assert report["killed_clients"] > 1
