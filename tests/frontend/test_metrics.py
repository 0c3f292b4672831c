"""tgis.frontend.metrics: the scrape against a literal table of TGIS's metrics, events against their values."""

import itertools
import re
import time

import msgspec
import pytest
from batches import request
from engine_clients import outputs
from scraped_metrics import Series, make_metrics, samples, value

from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.metric_families import FailureReason
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import RequestTimings
from tgis.frontend.request_log import RequestLog
from tgis.frontend.sampling_params import RawParams
from tgis.ipc.messages import BatcherCounters, FailureKind, StepStats
from tgis.ipc.request import StopReason

# What dashboards are built on, beside the names in docs/metrics.md: the values of labels, and buckets.
STEP = {"method": "prefill next_token"}
PASS = {**STEP, "makeup": "single_only"}
LABELS = {
    "tgi_request_count": {"kind": "single batch stream"},
    "tgi_request_failure": {"err": "conc_limit validation queue_full generate unknown cancelled timeout"},
    "tgi_request_success": {
        "stop_reason": "MAX_TOKENS EOS_TOKEN TIME_LIMIT STOP_SEQUENCE TOKEN_LIMIT",
        "kind": "single batch stream",
    },
    "tgi_speculation_proposed_tokens": {"proposer": "lookup draft"},
    "tgi_speculation_accepted_tokens": {"proposer": "lookup draft"},
    "tgi_batch_inference_count": STEP,
    "tgi_batch_inference_success": STEP,
    "tgi_batch_inference_failure": {**STEP, "reason": "oom error connection"},
    "tgi_batch_inference_batch_size_count": STEP,
    "tgi_batch_inference_duration_count": PASS,
    "tgi_batch_inference_forward_duration_count": PASS,
    "tgi_batch_inference_tokproc_duration_count": PASS,
}
# histogram other than of a duration: number of buckets, first and last finite bound (S = 96, N = 32, batches of 4)
BUCKETS = {
    "tgi_request_raw_input_length": (64, 1.5, 96),
    "tgi_request_input_length": (64, 1.5, 96),
    "tgi_request_max_new_tokens": (64, 0.5, 32),
    "tgi_request_generated_tokens": (64, 0.5, 32),
    "tgi_request_total_tokens": (64, 1.5, 96),
    "tgi_batch_inference_batch_size": (4, 1, 4),
    "tgi_batch_next_tokens": (14, 64, 524288),
    "tgi_speculation_step_tokens": (7, 1, 64),
    "tgi_tokenize_request_tokens": (14, 64, 524288),
}
GAUGES = (
    "tgi_batch_current_size",
    "tgi_batch_input_tokens",
    "tgi_batch_max_remaining_tokens",
    "tgi_batch_weight_utilization",
    "tgi_queue_size",
)


@pytest.fixture
def metrics() -> Metrics:
    return make_metrics()


def changed(metrics: Metrics) -> dict[str, float]:
    """Values other than 0 of untyped twins, gauges, and counts and sums of histograms."""
    skipped = ("_bucket", "_total", "_context_limit")
    return {
        " ".join([name, *(label for _, label in sorted(labels))]): number
        for name, series in samples(metrics).items()
        for labels, number in series.items()
        if number and name.startswith("tgi_") and not name.endswith(skipped)
    }


def combinations(labels: dict[str, str]) -> set[Series]:
    values = ([(name, label) for label in texts.split()] for name, texts in labels.items())
    return {frozenset(pairs) for pairs in itertools.product(*values)}


def test_the_scrape_has_exactly_these_values_of_labels(metrics: Metrics) -> None:
    for name, series in samples(metrics).items():
        if name.startswith("tgi_") and not name.endswith(("_sum", "_bucket")):
            assert set(series) == combinations(LABELS.get(name.removesuffix("_total"), {})), name


def test_buckets(metrics: Metrics) -> None:
    found = {name.removesuffix("_bucket"): one for name, one in samples(metrics).items() if name.endswith("_bucket")}
    assert {name for name in found if not name.endswith("_duration")} == BUCKETS.keys()
    for name, series in found.items():
        count, first, last = BUCKETS.get(name, (35, 0.00015, 145.6))
        bounds = sorted({float(dict(labels)["le"]) for labels in series})
        assert len(bounds) == count + 1
        assert [bounds[0], bounds[-2], bounds[-1]] == pytest.approx([first, last, float("inf")], rel=1e-3)


def test_every_family_has_help_and_type_once_and_nothing_is_created(metrics: Metrics) -> None:
    text = metrics.scrape().decode()
    helped = re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE)
    typed = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert helped == typed
    assert len(set(helped)) == len(helped)
    assert "_created" not in text


def test_counters_and_their_untyped_twins_agree(metrics: Metrics) -> None:
    metrics.request_started(CallKind.BATCH, 3)
    metrics.request_failed(FailureReason.CANCELLED, 2)
    metrics.step_failed(FailureKind.OUT_OF_MEMORY, prefill=True)
    found = samples(metrics)
    totals = [name for name in found if name.startswith("tgi_") and name.endswith("_total")]
    assert len(totals) > 20
    for name in totals:
        assert found[name] == found[name.removesuffix("_total")]
    assert value(metrics, "tgi_request_count_total", kind="batch") == 1
    assert value(metrics, "tgi_request_input_count_total") == 3
    assert value(metrics, "tgi_request_failure_total", err="cancelled") == 2


def succeed(metrics: Metrics, num_tokens: int) -> None:
    """Record a stream of 90 input tokens with an output of so many."""
    now = time.monotonic()
    (output,) = outputs([request(1, length=90)])
    output.timings = RequestTimings(now - 4.0, now - 3.5, now - 3.0, now - 2.0, now)
    output.num_tokens = output.num_generated = num_tokens
    output.stop_reason = StopReason.EOS_TOKEN
    call = GenerateCall(CallKind.STREAM, ["text"], ["text"], RawParams(), b"")
    with RequestLog(call, metrics, log_text=False) as log:
        log.submitted([output])
        log.finish(output)


def test_a_request_that_succeeds(metrics: Metrics) -> None:
    succeed(metrics, 5)
    sums = {
        "tgi_request_input_length": 90,
        "tgi_request_max_new_tokens": 20,
        "tgi_request_validation_duration": 0.5,
        "tgi_request_generated_tokens": 5,
        "tgi_request_total_tokens": 95,
        "tgi_request_duration": 4.0,
        "tgi_request_inference_duration": 3.0,
        "tgi_request_mean_time_per_token_duration": 0.6,
        "tgi_request_time_per_output_token_duration": 0.5,
    }
    assert changed(metrics) == pytest.approx(
        {
            "tgi_request_count stream": 1,
            "tgi_request_input_count": 1,
            "tgi_request_success stream EOS_TOKEN": 1,
            **{f"{name}_count": 1 for name in sums},
            **{f"{name}_sum": number for name, number in sums.items()},
        },
        rel=0.1,
    )


@pytest.mark.parametrize("generated", [0, 1])
def test_a_request_without_a_second_token_has_no_time_per_output_token(metrics: Metrics, generated: int) -> None:
    succeed(metrics, generated)
    assert value(metrics, "tgi_request_mean_time_per_token_duration_sum") == pytest.approx(3.0 * generated)
    assert value(metrics, "tgi_request_mean_time_per_token_duration_count") == 1
    assert value(metrics, "tgi_request_time_per_output_token_duration_count") == 0


PREFILL = StepStats(
    prefill=True,
    num_prefills=2,
    num_decodes=0,
    prefill_tokens=70,
    duration=0.5,
    forward_duration=0.25,
    num_running=5,
    context_tokens=250,
    remaining_tokens=40,
    concatenated=True,
    num_requeued=1,
    first_scheduled={1: 1.0, 2: 2.0},
    prompt_tokens=60,
)
DECODE = msgspec.structs.replace(
    PREFILL, prefill=False, num_prefills=0, num_decodes=3, num_running=3, remaining_tokens=27, num_requeued=0
)


def test_a_prefill(metrics: Metrics) -> None:
    metrics.num_queued = lambda: 2
    metrics.step_succeeded(PREFILL, 2, 0.125, {})
    assert changed(metrics) == {
        "tgi_batch_inference_count prefill": 1,
        "tgi_batch_inference_success prefill": 1,
        "tgi_batch_inference_batch_size_count prefill": 1,
        "tgi_batch_inference_batch_size_sum prefill": 2,
        "tgi_batch_inference_duration_count single_only prefill": 1,
        "tgi_batch_inference_duration_sum single_only prefill": 0.5,
        "tgi_batch_inference_forward_duration_count single_only prefill": 1,
        "tgi_batch_inference_forward_duration_sum single_only prefill": 0.25,
        "tgi_batch_inference_tokproc_duration_count single_only prefill": 1,
        "tgi_batch_inference_tokproc_duration_sum single_only prefill": 0.125,
        "tgi_batch_concatenation_count": 1,
        "tgi_batch_next_tokens_count": 1,
        "tgi_batch_next_tokens_sum": 70,
        "tgi_batch_prompt_tokens": 60,
        "tgi_batch_generated_tokens": 2,
        "tgi_request_queue_duration_count": 2,
        "tgi_request_queue_duration_sum": 3.0,
        "tgi_queue_size": 3,
        "tgi_batch_current_size": 5,
        "tgi_batch_input_tokens": 250,
        "tgi_batch_weight_utilization": 0.25,
        "tgi_batch_max_remaining_tokens": 40,
    }


def gauges(metrics: Metrics) -> list[float]:
    return [value(metrics, name) for name in GAUGES]


def test_gauges_follow_steps_and_are_zero_when_idle(metrics: Metrics) -> None:
    metrics.step_succeeded(DECODE, 3, 0.0, {})
    assert gauges(metrics) == [3, 250, 27, 0.25, 0]
    assert value(metrics, "tgi_batch_inference_success", method="next_token") == 1
    metrics.step_succeeded(
        msgspec.structs.replace(DECODE, num_running=0, context_tokens=0, remaining_tokens=0), 3, 0.0, {}
    )
    assert gauges(metrics) == [0, 0, 0, 0, 0]
    metrics.step_succeeded(PREFILL, 3, 0.0, {})
    metrics.last_step = None
    assert gauges(metrics) == [0, 0, 0, 0, 0]


def test_admission_counters_and_capacity(metrics: Metrics) -> None:
    assert value(metrics, "tgi_batch_context_limit") == 1000
    for _ in range(2):
        stats = msgspec.structs.replace(
            PREFILL, counters=BatcherCounters(1, 2, 3, 4, 5, 6, 7, 8, 3, 5, 4), token_capacity=900
        )
        metrics.step_succeeded(stats, 3, 0.0, {})
    assert value(metrics, "tgi_batch_context_limit") == 900
    names = ["queue_jump", "granular_batch_addition", "prefill_weight_limit_exceeded"]
    names += ["prefill_padding_limit_exceeded", "batch_preemption"]
    names += ["prefix_cache_query_tokens", "prefix_cache_hit_tokens"]
    assert [value(metrics, f"tgi_{name}") for name in names] == [2, 4, 6, 8, 10, 12, 14]
    metrics.batches.speculation.count_step_tokens(stats.counters, [[1, 2, 3, 4], [], [5]])
    kept = ("proposed_tokens", "accepted_tokens")
    assert [value(metrics, f"tgi_speculation_{name}", proposer="lookup") for name in kept] == [16, 6]
    assert [value(metrics, f"tgi_speculation_{name}", proposer="draft") for name in kept] == [10, 8]
    assert [value(metrics, f"tgi_speculation_step_tokens_{name}") for name in ("count", "sum")] == [3, 5]
