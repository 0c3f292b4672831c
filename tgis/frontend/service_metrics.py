"""The `tgi_*` metrics of the service itself, from its first second: what runs, its state, memory and credentials."""

import enum
import time
from collections.abc import Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector

from tgis.frontend.prometheus import Labels, MetricFamilies, exposition
from tgis.ipc.messages import EngineInfo


class ServiceState(enum.StrEnum):
    """The service is in one of them at any time."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


_INFO_LABELS: Labels = dict.fromkeys(("version", "commit", "engine", "model", "dtype", "device"), ())
_LORA_LABELS: Labels = dict.fromkeys(("max_lora", "running_lora_adapters", "waiting_lora_adapters"), ())


class ServiceMetrics:
    """On a registry of their own, with those of both processes. Not thread-safe."""

    def __init__(self, version: str, commit: str, model: str) -> None:
        add = MetricFamilies()
        self._info = add.gauge("tgi_info", "What is served, and by what.", _INFO_LABELS)
        self._state = add.gauge("tgi_state", "1 for the state of the service.", {"state": [*ServiceState]})
        self._engine_up = add.gauge("tgi_engine_up", "1 while the engine is ready and runs.")
        self._load_duration = add.gauge(
            "tgi_model_load_duration", "Seconds. From the start until the engine was ready."
        )
        self._block_size = add.gauge("tgi_kv_cache_block_size", "Tokens of a KV block; 0 for an engine without.")
        self._num_blocks = add.gauge("tgi_kv_cache_blocks", "KV blocks.")
        self._certificate_expiry = add.gauge(
            "tgi_certificate_expiry_timestamp_seconds", "When a certificate in use expires.", {"certificate": ()}
        )
        self._authentication_failure = add.counter("tgi_authentication_failure", "Calls without a valid bearer token.")
        self._log_lines_dropped = add.counter("tgi_log_lines_dropped", "Log lines that nobody read in time.")
        self._running_adapters = add.gauge("tgi_lora_running_adapters", "LoRA adapters of running requests.")
        self._waiting_adapters = add.gauge("tgi_lora_waiting_adapters", "LoRA adapters of queued requests only.")
        self._lora_requests = add.gauge("tgi_lora_requests_info", "LoRA adapters by name; a timestamp.", _LORA_LABELS)
        self._loop_lag = add.duration("tgi_event_loop_lag_duration", "How late the front end does what is due.")
        self._identity = {"version": version, "commit": commit, "model": model}
        self._max_adapters = 0  # in a batch
        self._num_log_lines_dropped = 0
        self._info.labels(**self._identity, engine="", dtype="", device="").set(1)
        self.set_state(ServiceState.LOADING)
        self._registry = CollectorRegistry()
        self._registry.register(add)
        ProcessCollector(registry=self._registry)

    def scrape(self) -> Iterator[bytes]:
        return exposition(self._registry)

    def set_state(self, state: ServiceState) -> None:
        for each in ServiceState:
            self._state.labels(each).set(each is state)

    def engine_started(self, pid: int) -> None:
        ProcessCollector("tgi_engine", lambda: pid, registry=self._registry)

    def engine_ready(self, info: EngineInfo, load_duration: float) -> None:
        self._info.clear()
        self._info.labels(**self._identity, engine=info.engine, dtype=info.dtype, device=info.device).set(1)
        self._engine_up.set(1)
        self._load_duration.set(load_duration)
        self._block_size.set(info.block_size)
        self._num_blocks.set(info.token_capacity // info.block_size if info.block_size else 0)
        self._max_adapters = info.max_batch_size if info.lora_targets else 0

    def set_engine_up(self, up: bool) -> None:
        self._engine_up.set(up)

    def set_certificate_expiry(self, times: Mapping[str, float]) -> None:
        """Set when each certificate expires, in seconds since 1970."""
        for name, seconds in times.items():
            self._certificate_expiry.labels(name).set(seconds)

    def event_loop_late(self, duration: float) -> None:
        self._loop_lag.observe(duration)

    def authentication_failed(self) -> None:
        self._authentication_failure.inc()

    def set_log_lines_dropped(self, total: int) -> None:
        self._log_lines_dropped.inc(total - self._num_log_lines_dropped)
        self._num_log_lines_dropped = total

    def set_lora_adapters(self, running: Collection[str], waiting: Collection[str]) -> None:
        """Set the ids of adapters that requests use; only queued ones those of `waiting`."""
        self._running_adapters.set(len(running))
        self._waiting_adapters.set(len(waiting))
        self._lora_requests.clear()
        if self._max_adapters:  # as the Gateway API inference extension reads it
            names = ",".join(sorted(running)), ",".join(sorted(waiting))
            self._lora_requests.labels(self._max_adapters, *names).set(time.time())
