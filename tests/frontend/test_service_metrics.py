"""tgis.frontend.metrics, of the service itself: what is exported from the first second, and what changes it."""

import asyncio
import os
import time

import msgspec
import pytest
from batches import request
from engine_clients import connected_client, engine_outputs
from harness import run_async
from scraped_metrics import samples, value

from tgis.frontend.engine_process import EngineProcess
from tgis.frontend.metric_families import ServiceState
from tgis.frontend.metrics import ServiceMetrics
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import EngineInfo, Heartbeat, Step, StepStats

INFO = EngineInfo("tgis_native", "M", "cpu", "bfloat16", 257, False, False, 4, 1000, 64, block_size=16)


@pytest.fixture
def metrics() -> ServiceMetrics:
    return ServiceMetrics("1.2", "abc", "org/model")


def test_the_memory_of_processes_that_run_is_in_the_scrape(metrics: ServiceMetrics) -> None:
    metrics.engine_started(os.getpid())
    for name in ("process_resident_memory_bytes", "tgi_engine_process_resident_memory_bytes"):
        assert value(metrics, name) > 1 << 20
    gone = ServiceMetrics("1.2", "abc", "org/model")
    gone.engine_started(1 << 30)  # above every process id
    assert "tgi_engine_process_resident_memory_bytes" not in samples(gone)


@run_async
async def test_what_holds_the_event_loop_is_in_the_metrics(metrics: ServiceMetrics) -> None:
    watch = asyncio.create_task(metrics.watch_event_loop(interval=0.001))
    await asyncio.sleep(0)  # it begins
    time.sleep(0.05)  # this is what it is to notice
    while value(metrics, "tgi_event_loop_lag_duration_count") == 0:
        await asyncio.sleep(0)
    watch.cancel()
    assert value(metrics, "tgi_event_loop_lag_duration_sum") > 0.04


def test_the_service_is_in_one_state(metrics: ServiceMetrics) -> None:
    for state in ServiceState:
        metrics.set_state(state)
        series = samples(metrics)["tgi_state"].items()
        assert {dict(labels)["state"]: number for labels, number in series} == {s: s is state for s in ServiceState}


def test_what_is_served_is_known_in_full_once_the_engine_is_ready(metrics: ServiceMetrics) -> None:
    known = {("version", "1.2"), ("commit", "abc"), ("model", "org/model")}
    (labels,) = samples(metrics)["tgi_info"]
    unknown = "engine", "dtype", "device", "quantize", "kv_cache_dtype", "fingerprint"
    assert labels == known | {(name, "") for name in unknown}
    metrics.engine_ready(INFO, 12.5)
    (labels,) = samples(metrics)["tgi_info"]
    assert labels == known | set(zip(unknown, ("tgis_native", "bfloat16", "cpu", "none", "auto", ""), strict=True))
    assert value(metrics, "tgi_model_load_duration") == 12.5
    assert value(metrics, "tgi_kv_cache_block_size") == 16
    assert value(metrics, "tgi_kv_cache_blocks") == 1000 // 16


@run_async
async def test_dropped_log_lines_of_all_processes_are_counted_once() -> None:
    metrics, process = ServiceMetrics("1.2", "abc", "org/model"), EngineProcess()
    for total in (0, 3, 3, 10):
        metrics.set_log_lines_dropped(total)
        assert value(metrics, "tgi_log_lines_dropped_total") == total
    for message in (Heartbeat(0), Heartbeat(0, 5), Heartbeat(1, 2), Heartbeat(0, 6)):
        process.handle(message)
    assert process.num_dropped_log_lines == 8


def test_lora_adapters_by_name(metrics: ServiceMetrics) -> None:
    metrics.set_lora_adapters({"a"}, set())
    assert "tgi_lora_requests_info" not in samples(metrics)  # the engine takes none
    metrics.engine_ready(msgspec.structs.replace(INFO, lora_targets={"q": (1, 1)}), 1.0)
    for running, waiting in (({"b", "a"}, {"c"}), (set[str](), set[str]())):
        metrics.set_lora_adapters(running, waiting)
        (labels,) = samples(metrics)["tgi_lora_requests_info"]
        names = {"running_lora_adapters": ",".join(sorted(running)), "waiting_lora_adapters": ",".join(sorted(waiting))}
        assert dict(labels) == names | {"max_lora": "4"}
        assert value(metrics, "tgi_lora_running_adapters") == len(running)
        assert value(metrics, "tgi_lora_waiting_adapters") == len(waiting)


@run_async
async def test_an_adapter_waits_while_none_of_its_requests_runs() -> None:
    client, _ = connected_client()
    adapters = [AdapterRef(name, length, 0, 90, 1) for name, length in (("a", 0), ("a", 0), ("b", 0), ("prompt", 2))]
    requests = [msgspec.structs.replace(request(n), adapter=adapter) for n, adapter in enumerate([*adapters, None])]
    with client.submit(engine_outputs(requests)):
        assert client.lora_adapters() == (set(), {"a", "b"})
        stats = StepStats(True, 2, 0, 9, 0.1, 0.1, 2, 9, 9, False, 0, dict.fromkeys([1, 3, 4], (0.1, 0)))
        client.handle(Step([], [], [], [], stats))
        assert client.lora_adapters() == ({"a"}, {"b"})
    assert client.lora_adapters() == (set(), set())
