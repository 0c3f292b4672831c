"""tgis.frontend.metrics, of the service itself: what is exported from the first second, and what changes it."""

import asyncio
import os
import time
from pathlib import Path

import msgspec
import pytest
from batches import request
from config_parsing import read
from engine_clients import connected_client, outputs
from harness import run_async
from scraped_metrics import samples, value

from demo.fake_model import make_fake_model
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.metric_families import ServiceState
from tgis.frontend.metrics import ServiceMetrics
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import EngineInfo, Heartbeat, Step, StepStats
from tgis.ipc.request import Request
from tgis.server import prepare

INFO = EngineInfo("tgis_native", "M", "cpu", "bfloat16", 257, False, False, 4, 1000, 64, block_size=16)


@pytest.fixture
def metrics() -> ServiceMetrics:
    return ServiceMetrics("1.2", "abc", "org/model")


def test_the_memory_of_both_processes_is_in_the_scrape(metrics: ServiceMetrics) -> None:
    metrics.engine_started(os.getpid())
    assert value(metrics, "process_resident_memory_bytes") > 1 << 20
    assert value(metrics, "tgi_engine_process_resident_memory_bytes") > 1 << 20


def test_an_engine_process_that_is_gone_has_no_memory(metrics: ServiceMetrics) -> None:
    metrics.engine_started(1 << 30)  # above every process id
    assert "tgi_engine_process_resident_memory_bytes" not in samples(metrics)


@run_async
async def test_metrics_exist_while_the_model_loads(tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "model")
    server = prepare(read(MODEL_NAME=str(model), DEPLOYMENT_FRAMEWORK="fake", CACHE_DIR=str(tmp_path)))
    scrape = server._scrape(EngineClient()).decode()
    for line in ('tgi_state{state="loading"} 1.0', 'tgi_state{state="serving"} 0.0', "tgi_engine_up 0.0"):
        assert line in scrape.splitlines()


@run_async
async def test_what_holds_the_event_loop_is_in_the_metrics(metrics: ServiceMetrics) -> None:
    awake = asyncio.Event()
    watch = asyncio.create_task(metrics.watch_event_loop(awake, interval=0.001))
    await asyncio.sleep(0.05)
    assert value(metrics, "tgi_event_loop_lag_duration_count") == 0
    awake.set()
    await asyncio.sleep(0)  # it is woken
    await asyncio.sleep(0)  # it watches
    time.sleep(0.2)  # this is what it is to notice
    while value(metrics, "tgi_event_loop_lag_duration_count") == 0:
        await asyncio.sleep(0)
    watch.cancel()
    assert value(metrics, "tgi_event_loop_lag_duration_sum") > 0.19


def test_the_service_is_in_one_state(metrics: ServiceMetrics) -> None:
    for state in ServiceState:
        metrics.set_state(state)
        series = samples(metrics)["tgi_state"]
        assert {dict(labels)["state"]: number for labels, number in series.items()} == {
            "loading": state == "loading",
            "serving": state == "serving",
            "draining": state == "draining",
        }


def test_what_is_served_is_known_in_full_once_the_engine_is_ready(metrics: ServiceMetrics) -> None:
    known = {("version", "1.2"), ("commit", "abc"), ("model", "org/model")}
    (labels,) = samples(metrics)["tgi_info"]
    unknown = "engine", "dtype", "device", "quantize", "kv_cache_dtype"
    assert labels == known | {(name, "") for name in unknown}
    metrics.engine_ready(INFO, 12.5)
    (labels,) = samples(metrics)["tgi_info"]
    assert labels == known | set(zip(unknown, ("tgis_native", "bfloat16", "cpu", "none", "auto"), strict=True))
    assert value(metrics, "tgi_model_load_duration") == 12.5
    assert value(metrics, "tgi_kv_cache_block_size") == 16
    assert value(metrics, "tgi_kv_cache_blocks") == 1000 // 16


def test_dropped_log_lines_are_counted_once(metrics: ServiceMetrics) -> None:
    for total in (0, 3, 3, 10):
        metrics.set_log_lines_dropped(total)
        assert value(metrics, "tgi_log_lines_dropped_total") == total


@run_async
async def test_dropped_log_lines_of_all_processes_of_the_engine_are_counted() -> None:
    client = EngineClient()
    for message in (Heartbeat(0), Heartbeat(0, 5), Heartbeat(1, 2), Heartbeat(0, 6)):
        client.handle(message)
    assert client.num_dropped_log_lines == 8


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


def with_adapter(request_id: int, name: str, length: int = 0) -> Request:
    return msgspec.structs.replace(request(request_id), adapter=AdapterRef(name, length, 0, 90 + request_id, 1))


@run_async
async def test_an_adapter_waits_while_none_of_its_requests_runs() -> None:
    client, _ = connected_client()
    requests = [
        with_adapter(0, "a"),
        with_adapter(1, "a"),
        with_adapter(2, "b"),
        with_adapter(3, "prompt", 2),
        request(4),
    ]
    with client.submit(outputs(requests), eager=True):
        assert client.lora_adapters() == (set(), {"a", "b"})
        stats = StepStats(True, 2, 0, 9, 0.1, 0.1, 2, 9, 9, False, 0, dict.fromkeys([1, 3, 4], 0.1))
        client.handle(Step([], [], [], [], stats))
        assert client.lora_adapters() == ({"a"}, {"b"})
    assert client.lora_adapters() == (set(), set())
