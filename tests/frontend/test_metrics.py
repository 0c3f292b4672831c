"""tgis.frontend.metrics: of calls, of the engine and of the service itself; docs/metrics.md against a scrape."""

import asyncio
import itertools
import os
import re
import time

import msgspec
import pytest
import yaml
from batches import request
from engine_clients import connected_client, engine_outputs, outputs
from harness import run_async
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from repository import REPOSITORY
from scraped_metrics import Series, full_scrape, make_metrics, samples, value

from tgis.errors import EngineFailure, InvalidRequest, Overloaded, QueueFull, Unavailable
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.engine_output import RequestTimings
from tgis.frontend.engine_process import EngineProcess
from tgis.frontend.metric_families import FailureReason, ServiceState
from tgis.frontend.metrics import Metrics, ServiceMetrics
from tgis.frontend.params import Params
from tgis.frontend.recorder import CallRecorder
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import BatcherCounters, EngineInfo, FailureKind, Heartbeat, Step, StepStats
from tgis.ipc.request import StopReason

EXPECTED = yaml.safe_load((REPOSITORY / "tests/golden/metrics.yaml").read_text())
GAUGES = ["tgi_batch_current_size", "tgi_batch_input_tokens", "tgi_batch_max_remaining_tokens"]
GAUGES += ["tgi_batch_weight_utilization", "tgi_queue_size"]


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


def expected(name: str) -> dict[str, float]:
    """Samples of the table, with those of histograms under their own names."""
    expanded = dict[str, float]()
    for key, values in EXPECTED[name].items():
        family, _, labels = key.partition(" ")
        kinds = {"_count": values[0], "_sum": values[1]} if isinstance(values, list) else {"": values}
        expanded |= {f"{family}{kind} {labels}".strip(): value for kind, value in kinds.items()}
    return expanded


def combinations(labels: dict[str, str]) -> set[Series]:
    values = ([(name, label) for label in texts.split()] for name, texts in labels.items())
    return {frozenset(pairs) for pairs in itertools.product(*values)}


def test_the_scrape_has_exactly_these_values_of_labels(metrics: Metrics) -> None:
    for name, series in samples(metrics).items():
        if name.startswith("tgi_") and not name.endswith(("_sum", "_bucket")):
            assert set(series) == combinations(EXPECTED["labels"].get(name.removesuffix("_total"), {})), name


def test_buckets(metrics: Metrics) -> None:
    metrics.requests.inter_token_latency.observe(0.00015, 2)
    name = "tgi_request_inter_token_latency_duration"
    assert [value(metrics, f"{name}_bucket", le="0.00015"), value(metrics, f"{name}_sum")] == [2, 0.0003]
    histograms = {
        name.removesuffix("_bucket"): series for name, series in samples(metrics).items() if name.endswith("_bucket")
    }
    assert {name for name in histograms if not name.endswith("_duration")} == EXPECTED["buckets"].keys()
    for name, series in histograms.items():
        count, first, last = EXPECTED["buckets"].get(name, (35, 0.00015, 145.6))
        bounds = sorted({float(dict(labels)["le"]) for labels in series})
        assert len(bounds) == count + 1
        assert [bounds[0], bounds[-2], bounds[-1]] == pytest.approx([first, last, float("inf")], rel=1e-3)


def test_counters_and_their_untyped_twins_agree(metrics: Metrics) -> None:
    metrics.request_started(CallKind.BATCH, 3)
    metrics.request_failed(FailureReason.CANCELLED, 2)
    metrics.step_failed(FailureKind.OUT_OF_MEMORY, prefill=True)
    scraped = samples(metrics)
    totals = [name for name in scraped if name.startswith("tgi_") and name.endswith("_total")]
    assert len(totals) > 20
    assert all(scraped[name] == scraped[name.removesuffix("_total")] for name in totals)
    assert changed(metrics) == {
        "tgi_request_count batch": 1,
        "tgi_request_input_count": 3,
        "tgi_request_failure cancelled": 2,
        "tgi_batch_inference_count prefill": 1,
        "tgi_batch_inference_failure prefill oom": 1,
    }


def succeed(metrics: Metrics, num_tokens: int) -> None:
    """Record a stream of 90 input tokens with an output of so many."""
    now = time.monotonic()
    (output,) = outputs([request(1, length=90)])
    output.engine_output.timings = RequestTimings(now - 4.0, now - 3.5, now - 3.0, now - 2.0, now)
    output.engine_output.num_tokens = output.num_generated = num_tokens
    output.stop_reason = StopReason.EOS_TOKEN
    call = GenerateCall(CallKind.STREAM, ["text"], ["text"], Params(), b"")
    with CallRecorder(call, metrics, log_text=False) as recorder:
        recorder.submitted([output])
        recorder.finish(output)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("x"), "conc_limit"),
        (QueueFull("x"), "queue_full"),
        (InvalidRequest("field", "x"), "validation"),
        (Unavailable("x"), "unknown"),
        (EngineFailure("x"), "generate"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_why_a_call_fails(metrics: Metrics, error: BaseException, reason: str) -> None:
    call = GenerateCall(CallKind.BATCH, ["text"], ["text"], Params(), n=2)
    with pytest.raises(type(error)), CallRecorder(call, metrics, log_text=False):
        raise error
    counted = {"tgi_request_count batch": 1, "tgi_request_input_count": 2}
    assert changed(metrics) == counted | {f"tgi_request_failure {reason}": 2 if reason == "cancelled" else 1}


def test_a_request_that_succeeds(metrics: Metrics) -> None:
    succeed(metrics, 5)
    assert changed(metrics) == pytest.approx(expected("request"), rel=0.1)


@pytest.mark.parametrize("generated", [0, 1, 2])
def test_a_request_without_a_second_token_has_no_time_per_output_token(metrics: Metrics, generated: int) -> None:
    succeed(metrics, generated)
    mean = pytest.approx(3.0 / max(generated, 1) * bool(generated))
    assert value(metrics, "tgi_request_mean_time_per_token_duration_sum") == mean
    assert value(metrics, "tgi_request_mean_time_per_token_duration_count") == 1
    assert value(metrics, "tgi_request_time_per_output_token_duration_count") == (generated == 2)


PREFILL = StepStats(True, 2, 0, 70, 0.5, 0.25, 5, 250, 40, True, 1, {1: (1.0, 0), 2: (2.0, 0)}, prompt_tokens=60)
DECODE = msgspec.structs.replace(
    PREFILL, prefill=False, num_prefills=0, num_decodes=3, num_running=3, remaining_tokens=27, num_requeued=0
)


def test_a_prefill(metrics: Metrics) -> None:
    metrics.set_num_queued(2)
    metrics.step_succeeded(PREFILL, [[7], [7]], 0.125, {})
    assert changed(metrics) == expected("prefill")


def gauges(metrics: Metrics) -> list[float]:
    return [value(metrics, name) for name in GAUGES]


def test_gauges_follow_steps_and_are_zero_when_idle(metrics: Metrics) -> None:
    metrics.step_succeeded(DECODE, [[7]] * 3, 0.0, {})
    assert gauges(metrics) == [3, 250, 27, 0.25, 0]
    assert value(metrics, "tgi_batch_inference_success", method="next_token") == 1
    idle = msgspec.structs.replace(DECODE, num_running=0, context_tokens=0, remaining_tokens=0)
    metrics.step_succeeded(idle, [[7]] * 3, 0.0, {})
    assert gauges(metrics) == [0, 0, 0, 0, 0]
    metrics.step_succeeded(PREFILL, [[7]] * 3, 0.0, {})
    metrics.no_step_left()
    assert gauges(metrics) == [0, 0, 0, 0, 0]


def test_admission_counters_and_capacity(metrics: Metrics) -> None:
    assert value(metrics, "tgi_batch_context_limit") == 1000
    counters = BatcherCounters(1, 2, 3, 4, 5, 6, 7, 8, 3, 5, 4)
    stats = msgspec.structs.replace(PREFILL, counters=counters, token_capacity=900, num_decodes=3)
    for _ in range(2):
        metrics.step_succeeded(stats, [], 0.0, {})
    for counts in (counters, BatcherCounters(), BatcherCounters(proposed_tokens=1), BatcherCounters(drafted_tokens=1)):
        metrics.batches.speculation.count_step_tokens(counts, [[1, 2, 3, 4], [], [5]])
    counted, names = changed(metrics), ["queue_jump", "granular_batch_addition"]
    assert counted["tgi_batch_inference_batch_size_sum next_token"] == 2 * 3
    names += [f"prefill_{kind}_limit_exceeded" for kind in ("weight", "padding")]
    names += ["batch_preemption", "prefix_cache_query_tokens", "prefix_cache_hit_tokens"]
    assert [counted[f"tgi_{name}"] for name in names] == [2, 4, 6, 8, 10, 12, 14]
    names = [f"{name}_tokens {proposer}" for proposer in ("lookup", "draft") for name in ("proposed", "accepted")]
    names += ["step_tokens_count", "step_tokens_sum"]
    assert [counted[f"tgi_speculation_{name}"] for name in names] == [16, 6, 10, 8, 3 * 3, 3 * 5]
    assert value(metrics, "tgi_batch_context_limit") == 900


INFO = EngineInfo("tgis_native", "M", "cpu", "bfloat16", 257, False, False, 4, 1000, 64, 16, kv_cache_bytes=1 << 20)


@pytest.fixture
def service_metrics() -> ServiceMetrics:
    return ServiceMetrics("1.2", "abc", "org/model")


def test_the_memory_of_processes_that_run_is_in_the_scrape(service_metrics: ServiceMetrics) -> None:
    service_metrics.engine_started(os.getpid())
    for name in ("process_resident_memory_bytes", "tgi_engine_process_resident_memory_bytes"):
        assert value(service_metrics, name) > 1 << 20
    gone = ServiceMetrics("1.2", "abc", "org/model")
    gone.engine_started(1 << 30)  # above every process id
    assert "tgi_engine_process_resident_memory_bytes" not in samples(gone)


@run_async
async def test_what_holds_the_event_loop_is_in_the_metrics(service_metrics: ServiceMetrics) -> None:
    watch = asyncio.create_task(service_metrics.watch_event_loop(interval=0.001))
    await asyncio.sleep(0)  # it begins
    time.sleep(0.05)  # this is what it is to notice
    while value(service_metrics, "tgi_event_loop_lag_duration_count") == 0:
        await asyncio.sleep(0)
    watch.cancel()
    assert value(service_metrics, "tgi_event_loop_lag_duration_sum") > 0.04


def test_the_service_is_in_one_state(service_metrics: ServiceMetrics) -> None:
    for number, state in enumerate(ServiceState):  # a service begins in the first state
        if number:
            service_metrics.set_state(state)
        series = samples(service_metrics)["tgi_state"].items()
        assert {dict(labels)["state"]: number for labels, number in series} == {s: s is state for s in ServiceState}


def test_what_is_served_is_known_in_full_once_the_engine_is_ready(service_metrics: ServiceMetrics) -> None:
    known = {("version", "1.2"), ("commit", "abc"), ("model", "org/model")}
    (labels,) = samples(service_metrics)["tgi_info"]
    unknown = "engine", "dtype", "device", "quantize", "kv_cache_dtype", "fingerprint"
    assert labels == known | {(name, "") for name in unknown}
    service_metrics.engine_ready(INFO, 12.5)
    ((labels, one),) = samples(service_metrics)["tgi_info"].items()
    assert one == 1
    assert labels == known | set(zip(unknown, ("tgis_native", "bfloat16", "cpu", "none", "auto", ""), strict=True))
    names = "model_load_duration", "kv_cache_block_size", "kv_cache_blocks", "kv_cache_bytes", "batch_max_size"
    facts = [value(service_metrics, f"tgi_{name}") for name in (*names, "engine_up")]
    assert facts == [12.5, 16, 1000 // 16, 1 << 20, 4, 1]


@run_async
async def test_dropped_log_lines_of_all_processes_are_counted_once() -> None:
    service_metrics, process = ServiceMetrics("1.2", "abc", "org/model"), EngineProcess()
    for total in (0, 3, 3, 10):
        service_metrics.set_log_lines_dropped(total)
        assert value(service_metrics, "tgi_log_lines_dropped_total") == total
    for message in (Heartbeat(0), Heartbeat(0, 5, 1), Heartbeat(1, 2, 50), Heartbeat(0, 6, 7)):
        process.handle(message)
    assert (process.num_dropped_log_lines, process.resident_cache_bytes) == (8, 57)


def test_lora_adapters_by_name(service_metrics: ServiceMetrics) -> None:
    service_metrics.set_lora_adapters({"a"}, set())
    assert "tgi_lora_requests_info" not in samples(service_metrics)  # the engine takes none
    service_metrics.engine_ready(msgspec.structs.replace(INFO, lora_targets={"q": (1, 1)}), 1.0)
    for running, waiting in (({"b", "a"}, {"c"}), (set[str](), set[str]())):
        service_metrics.set_lora_adapters(running, waiting)
        (labels,) = samples(service_metrics)["tgi_lora_requests_info"]
        names = {"running_lora_adapters": ",".join(sorted(running)), "waiting_lora_adapters": ",".join(sorted(waiting))}
        assert dict(labels) == names | {"max_lora": "4"}
        assert value(service_metrics, "tgi_lora_running_adapters") == len(running)
        assert value(service_metrics, "tgi_lora_waiting_adapters") == len(waiting)


@run_async
async def test_an_adapter_waits_while_none_of_its_requests_runs() -> None:
    client, _ = connected_client()
    adapters = [AdapterRef(name, length, 0, 90, 1) for name, length in (("a", 0), ("a", 0), ("b", 0), ("prompt", 2))]
    requests = [msgspec.structs.replace(request(n), adapter=adapter) for n, adapter in enumerate([*adapters, None])]
    outputs = engine_outputs(requests, time.monotonic() - 500)
    with client.submit(outputs):
        assert client.lora_adapters() == (set(), {"a", "b"})
        stats = StepStats(True, 2, 0, 9, 0.1, 0.1, 2, 9, 9, False, 0, {1: (0.1, 4), 3: (0.1, 5), 4: (0.1, 1)})
        client.handle(Step([], [], [], [], stats))
        assert client.lora_adapters() == ({"a"}, {"b"})
        assert [output.num_cached_tokens for output in outputs] == [0, 4, 0, 3, 1]  # soft prompts do not count
        assert [output.timings.scheduled > output.timings.submitted for output in outputs] == [0, 1, 0, 1, 1]
    assert client.lora_adapters() == (set(), set())


DOCS = (REPOSITORY / "docs" / "metrics.md").read_text()


def test_the_tables_have_every_metric_as_it_is() -> None:
    rows = set(re.findall(r"^\| `tgi_.*$", DOCS, re.MULTILINE))
    families = [family for family in text_string_to_metric_families(full_scrape()) if family.name.startswith("tgi_")]
    assert rows == {
        f"| `{family.name}` | {family.type} |{_labels(family.samples)} | {family.documentation} |"
        for family in families
        if family.type != "unknown"  # the twins of counters
    }


def _labels(samples: list[Sample]) -> str:
    names = sorted({label for sample in samples for label in sample.labels} - {"le"})
    return " " * bool(names) + ", ".join(f"`{name}`" for name in names)


def test_names_beside_the_tables_are_of_metrics() -> None:
    exported = {re.split(r"[{ ]", line)[0] for line in full_scrape().splitlines()}
    named = set(re.findall(r"`(tgi_(?!engine_process)\w+)`", DOCS))
    assert len(named) > 50
    assert {name for name in named if not {name, f"{name}_count"} & exported} == set()
