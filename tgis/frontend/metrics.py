"""What is counted when: callers report events, and only this module touches the metrics of `metric_families.py`."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping

from prometheus_client import ProcessCollector

from tgis.frontend.calls import CallKind
from tgis.frontend.metric_families import (
    AdapterFamilies,
    BatchFamilies,
    FailureReason,
    MetricFamilies,
    RequestFamilies,
    ServiceFamilies,
    ServiceState,
    TokenizeFamilies,
    linear_buckets,
)
from tgis.frontend.output import Output
from tgis.frontend.validation import RequestLimits
from tgis.ipc.messages import BatcherCounters, EngineInfo, FailureKind, StepStats

_NO_COUNTS = BatcherCounters()

# Called at the end of each call with its API, method and status.
CountCall = Callable[[str, str, str], object]


class Metrics:
    """The metrics of requests and steps, once the engine has reported its limits. Not thread-safe.

    Events that change several families have a method; callers count others in the families themselves.
    """

    def __init__(self, limits: RequestLimits, info: EngineInfo) -> None:
        """The limits set the histogram buckets."""
        families, token_capacity = MetricFamilies(), info.token_capacity
        lengths, new_tokens = linear_buckets(limits.max_sequence_length), linear_buckets(limits.max_new_tokens)
        self.requests = RequestFamilies(families, lengths, new_tokens)
        self.batches = BatchFamilies(families, range(1, info.max_batch_size + 1))
        self.tokenize = TokenizeFamilies(families)
        self.adapters = AdapterFamilies(families)
        self.scrape = families.scrape
        self._num_queued = 0
        self._last_step: StepStats | None = None
        self.batches.context_limit.set(token_capacity)
        self.batches.queue_size.set_function(lambda: self._num_queued + self._left("num_requeued"))
        self.batches.current_size.set_function(lambda: self._left("num_running"))
        self.batches.input_tokens.set_function(lambda: self._left("context_tokens"))
        self.batches.weight_utilization.set_function(lambda: self._left("context_tokens") / token_capacity)
        self.batches.remaining_tokens.set_function(lambda: self._left("remaining_tokens"))

    def request_started(self, kind: CallKind, num_inputs: int) -> None:
        """Count a call to generate, before any check."""
        self.requests.count.labels(kind).inc()
        self.requests.input_count.inc(num_inputs)

    def request_failed(self, failure: FailureReason, count: int = 1) -> None:
        """Count a failed call, or `count` inputs that were cancelled or expired in the queue."""
        self.requests.failure.labels(failure).inc(count)

    def request_succeeded(self, kind: CallKind, output: Output) -> None:
        """Record an input whose output is complete."""
        requests, timings, num_tokens = self.requests, output.engine_output.timings, output.num_generated
        if output.expired_in_queue:
            self.request_failed(FailureReason.TIMEOUT)
        requests.success.labels(output.stop_reason.name, kind).inc()
        requests.generated_tokens.observe(num_tokens)
        requests.total_tokens.observe(output.request.input_length + num_tokens)
        requests.duration.observe(time.monotonic() - timings.arrived)
        requests.inference.observe(timings.inference)
        requests.mean_time_per_token.observe(timings.inference / num_tokens if num_tokens else 0.0)
        if num_tokens > 1:
            requests.time_per_output_token.observe((timings.last_token - timings.first_token) / (num_tokens - 1))

    def step_succeeded(
        self, stats: StepStats, tokens: list[list[int]], processing: float, latencies: Mapping[float, int]
    ) -> None:
        """Record a step.

        `tokens` of each sequence; `processing`: seconds that the front end spent on them; `latencies`: seconds since
        the step that gave an input tokens before -> how many inputs got tokens now.
        """
        batches, self._last_step, method = self.batches, stats, "prefill" if stats.prefill else "next_token"
        batches.count.labels(method).inc()
        batches.success.labels(method).inc()
        batches.duration.labels(method, "single_only").observe(stats.duration)
        batches.forward.labels(method, "single_only").observe(stats.forward_duration)
        batches.tokproc.labels(method, "single_only").observe(processing)
        batches.prompt_tokens.inc(stats.prompt_tokens)
        batches.generated_tokens.inc(sum(map(len, tokens)))
        if stats.prefill:
            batches.next_tokens.observe(stats.prefill_tokens)
            batches.size.labels("prefill").observe(stats.num_prefills)
        if stats.num_decodes:  # engines that mix prefill and decodes have both
            batches.size.labels("next_token").observe(stats.num_decodes)
        batches.concatenation.inc(stats.concatenated)
        for seconds, _ in stats.first_scheduled.values():
            self.requests.queue.observe(seconds)
        for seconds, count in latencies.items():
            self.requests.inter_token_latency.observe(seconds, count)
        if stats.counters != _NO_COUNTS:
            batches.count_admissions(stats.counters)
            batches.speculation.count_step_tokens(stats.counters, tokens)
        batches.context_limit.set(stats.token_capacity)

    def no_step_left(self) -> None:
        """Nothing is left of the last step, and no further step would say so."""
        self._last_step = None

    def set_num_queued(self, num_queued: int) -> None:
        """Set how many requests have never been scheduled."""
        self._num_queued = num_queued

    def step_failed(self, kind: FailureKind, *, prefill: bool) -> None:
        """Count a step that failed as a whole."""
        method = "prefill" if prefill else "next_token"
        self.batches.count.labels(method).inc()
        self.batches.failure.labels(method, kind).inc()

    def _left(self, field: str) -> int:
        """What a field of the last step says of the batch and the queue."""
        value: int = getattr(self._last_step, field, 0)
        return value


class ServiceMetrics(ServiceFamilies):
    """The metrics of the service itself and of both processes, from the first second. Not thread-safe."""

    def __init__(self, version: str, commit: str, model: str) -> None:
        families = MetricFamilies()
        super().__init__(families)
        self._registry = families.registry
        self.scrape = families.scrape
        self._identity = {"version": version, "commit": commit, "model": model}
        self._max_adapters = 0  # most adapters in a batch
        self._num_log_lines_dropped = 0
        unknown = dict.fromkeys(("engine", "dtype", "device", "quantize", "kv_cache_dtype", "fingerprint"), "")
        self.info.labels(**self._identity, **unknown).set(1)
        self.set_state(ServiceState.LOADING)
        ProcessCollector(registry=self._registry)

    def set_state(self, state: ServiceState) -> None:
        for each in ServiceState:
            self.state.labels(each).set(each is state)

    def engine_started(self, pid: int) -> None:
        ProcessCollector("tgi_engine", lambda: pid, registry=self._registry)

    def engine_ready(self, info: EngineInfo, load_duration: float) -> None:
        self.info.clear()
        facts = {"engine": info.engine, "dtype": info.dtype, "device": info.device, "quantize": info.quantize}
        facts |= {"kv_cache_dtype": info.kv_cache_dtype, "fingerprint": info.fingerprint}
        self.info.labels(**self._identity, **facts).set(1)
        self.engine_up.set(1)
        self.load_duration.set(load_duration)
        self.block_size.set(info.block_size)
        self.num_blocks.set(info.token_capacity // info.block_size if info.block_size else 0)
        self.cache_bytes.set(info.kv_cache_bytes)
        self.max_batch_size.set(info.max_batch_size)
        self._max_adapters = info.max_batch_size if info.lora_targets else 0

    def call_ended(self, api: str, method: str, status: str) -> None:
        self.calls.labels(api, method, status).inc()

    def set_certificate_expiry(self, times: Mapping[str, float]) -> None:
        """Set when each certificate expires, in seconds since 1970."""
        for name, seconds in times.items():
            self.certificate_expiry.labels(name).set(seconds)

    async def watch_event_loop(self, interval: float = 0.05) -> None:
        """Wake up every `interval` seconds, and observe how late: every call and probe waits as long. Never returns."""
        while True:
            due = time.monotonic() + interval
            await asyncio.sleep(interval)
            self.loop_lag.observe(time.monotonic() - due)

    def set_log_lines_dropped(self, total: int) -> None:
        self.log_lines_dropped.inc(total - self._num_log_lines_dropped)
        self._num_log_lines_dropped = total

    def set_lora_adapters(self, running: Collection[str], waiting: Collection[str]) -> None:
        """Set the ids of adapters that requests use; only queued ones those of `waiting`."""
        self.running_adapters.set(len(running))
        self.waiting_adapters.set(len(waiting))
        self.lora_requests.clear()
        if self._max_adapters:  # metric of the Gateway API inference extension
            names = ",".join(sorted(running)), ",".join(sorted(waiting))
            self.lora_requests.labels(self._max_adapters, *names).set(time.time())
