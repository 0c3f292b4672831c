"""The `tgi_*` metrics: which exist, what they count, and how Prometheus gets them.

Other rooms tell events; only this one knows metric objects. Names, labels and meaning are those of TGIS, but
its two summaries are histograms here. Whatever ends in `duration` is in seconds.
"""

import enum
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from tgis.frontend.calls import CallKind
from tgis.frontend.prometheus import Labels, MetricFamilies
from tgis.ipc.messages import AdmissionCounters, FailureKind, StepStats
from tgis.ipc.request import StopReason


class FailureReason(enum.StrEnum):
    """Why a call failed; the last two are counted per input."""

    TOO_MANY = "conc_limit"
    VALIDATION = "validation"
    QUEUE_FULL = "queue_full"
    GENERATION = "generate"
    UNKNOWN = "unknown"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


_KIND_LABELS: Labels = {"kind": [*CallKind]}
_FAILURE_LABELS: Labels = {"err": [*FailureReason]}
_SUCCESS_REASONS = ["MAX_TOKENS", "EOS_TOKEN", "TIME_LIMIT", "STOP_SEQUENCE", "TOKEN_LIMIT"]
_SUCCESS_LABELS: Labels = {"stop_reason": _SUCCESS_REASONS, **_KIND_LABELS}
_METHOD_LABELS: Labels = {"method": ["prefill", "next_token"]}
_STEP_FAILURE_LABELS: Labels = {
    **_METHOD_LABELS,
    "reason": [FailureKind.OUT_OF_MEMORY, FailureKind.ERROR, "connection"],
}  # the last for dashboards: a lost engine ends the process
_STEP_LABELS: Labels = {**_METHOD_LABELS, "makeup": ["single_only"]}

_POWERS_OF_TWO = [2.0**k for k in range(6, 20)]


class Metrics:
    """Every metric, on a registry of its own; events come from one thread."""

    def __init__(
        self, *, max_sequence_length: int, max_new_tokens: int, max_batch_size: int, token_capacity: int
    ) -> None:
        """The limits, in tokens and rows, decide the buckets, and what a full batch is."""
        families = MetricFamilies()
        self._requests = _RequestMetrics(
            families, _linear_buckets(max_sequence_length), _linear_buckets(max_new_tokens)
        )
        self._batches = _BatchMetrics(families, range(1, max_batch_size + 1))
        self._tokenize = _TokenizeMetrics(families)
        self._adapters = _AdapterMetrics(families)
        self._batches.context_limit.set(token_capacity)
        self._token_capacity = token_capacity
        self._num_new = 0  # requests that have never been in a step
        self._num_requeued = 0  # requests that wait again
        self._registry = CollectorRegistry()
        self._registry.register(families)
        ProcessCollector(registry=self._registry)

    def scrape(self) -> bytes:
        """All metrics in the text format of Prometheus, version 0.0.4."""
        return generate_latest(self._registry)

    def request_started(self, kind: CallKind, inputs: int) -> None:
        """A call to generate has come, before any check."""
        self._requests.count.labels(kind).inc()
        self._requests.input_count.inc(inputs)

    def input_tokenized(self, raw_length: int) -> None:
        """One input has this many tokens, before truncation."""
        self._requests.raw_length.observe(raw_length)

    def request_validated(self, lengths: Sequence[int], max_new_tokens: int, duration: float) -> None:
        """A call is valid: tokens of each input after truncation, new tokens asked for, seconds it took."""
        for length in lengths:
            self._requests.input_length.observe(length)
            self._requests.max_new_tokens.observe(max_new_tokens)
        self._requests.validation.observe(duration)

    def request_failed(self, failure: FailureReason, count: int = 1) -> None:
        """A call has failed, or `count` inputs were cancelled or ran out of time in the queue."""
        self._requests.failure.labels(failure).inc(count)

    def first_token(self, duration: float) -> None:
        """The first token of an input is there, seconds after its call came."""
        self._requests.time_to_first_token.observe(duration)

    def request_succeeded(
        self,
        kind: CallKind,
        reason: StopReason,
        *,
        input_tokens: int,
        generated_tokens: int,
        duration: float,
        inference: float,
        decoding: float,
    ) -> None:
        """An input has ended well, so many seconds after its call, its leaving the queue, its first token."""
        requests = self._requests
        requests.success.labels(reason.name, kind).inc()
        requests.generated_tokens.observe(generated_tokens)
        requests.total_tokens.observe(input_tokens + generated_tokens)
        requests.duration.observe(duration)
        requests.inference.observe(inference)
        requests.mean_time_per_token.observe(inference / generated_tokens if generated_tokens else 0.0)
        if generated_tokens > 1:
            requests.time_per_output_token.observe(decoding / (generated_tokens - 1))

    def step_succeeded(self, stats: StepStats, processing: float) -> None:
        """A pass has succeeded; `processing` is the seconds that the front end spent on its tokens."""
        batches, method = self._batches, _method(stats.prefill)
        batches.count.labels(method).inc()
        batches.success.labels(method).inc()
        batches.duration.labels(method, "single_only").observe(stats.duration)
        batches.forward.labels(method, "single_only").observe(stats.forward_duration)
        batches.tokproc.labels(method, "single_only").observe(processing)
        if stats.prefill:
            batches.next_tokens.observe(stats.prefill_tokens)
            batches.size.labels("prefill").observe(stats.num_prefills)
        if stats.num_decodes:  # in a prefill too, where the engine mixes them
            batches.size.labels("next_token").observe(stats.num_decodes)
        batches.concatenation.inc(stats.concatenated)
        for seconds in stats.queue_durations:
            self._requests.queue.observe(seconds)
        batches.count_admissions(stats.admissions)
        batches.context_limit.set(stats.token_capacity)
        self._set_batch_gauges(stats.num_running, stats.context_tokens, stats.remaining_tokens)
        self._num_requeued = stats.num_requeued
        self.set_queued(self._num_new)

    def set_queued(self, new: int) -> None:
        """So many requests wait that have never been in a step."""
        self._num_new = new
        self._batches.queue_size.set(new + self._num_requeued)

    def step_failed(self, kind: FailureKind, *, prefill: bool) -> None:
        """A pass has failed as a whole."""
        self._batches.count.labels(_method(prefill)).inc()
        self._batches.failure.labels(_method(prefill), kind).inc()

    def engine_idle(self) -> None:
        """No request is left: what cancels and failures took away without a pass is gone too."""
        self._set_batch_gauges(0, 0, 0)
        self._num_requeued = 0
        self.set_queued(0)

    def tokenize_started(self, inputs: int) -> None:
        """A call to Tokenize has come."""
        self._tokenize.count.inc()
        self._tokenize.input_count.inc(inputs)

    def tokenize_succeeded(self, tokens: int, duration: float) -> None:
        """A call to Tokenize found so many tokens in all, in so many seconds."""
        self._tokenize.tokens.observe(tokens)
        self._tokenize.duration.observe(duration)

    def adapter_load_failed(self) -> None:
        """A soft prompt or adapter was asked for and is not to be had."""
        self._adapters.failure.inc()

    def adapter_loaded(self, duration: float) -> None:
        """A soft prompt or adapter was asked for and had to be loaded; seconds until it was there."""
        self._adapters.duration.observe(duration)

    def engine_up(self, up: bool) -> None:
        """The engine process has become ready, or is gone."""
        self._batches.engine_up.set(up)

    def _set_batch_gauges(self, num_running: int, context_tokens: int, remaining_tokens: int) -> None:
        self._batches.current_size.set(num_running)
        self._batches.input_tokens.set(context_tokens)
        self._batches.weight_utilization.set(context_tokens / self._token_capacity)
        self._batches.remaining_tokens.set(remaining_tokens)


def _method(prefill: bool) -> str:
    return "prefill" if prefill else "next_token"


def _linear_buckets(limit: int) -> list[float]:
    return [limit / 64 * k for k in range(1, 65)]


class _RequestMetrics:
    """What becomes of calls and their inputs."""

    def __init__(self, add: MetricFamilies, sequence: Sequence[float], new: Sequence[float]) -> None:
        self.count = add.counter("tgi_request_count", "Calls to generate.", _KIND_LABELS)
        self.input_count = add.counter("tgi_request_input_count", "Inputs of calls to generate.")
        self.failure = add.counter("tgi_request_failure", "Calls or inputs that failed.", _FAILURE_LABELS)
        self.success = add.counter("tgi_request_success", "Inputs that ended well.", _SUCCESS_LABELS)

        self.raw_length = add.histogram("tgi_request_raw_input_length", "Tokens before truncation.", sequence)
        self.input_length = add.histogram("tgi_request_input_length", "Tokens after truncation.", sequence)
        self.max_new_tokens = add.histogram("tgi_request_max_new_tokens", "New tokens asked for.", new)
        self.generated_tokens = add.histogram("tgi_request_generated_tokens", "New tokens.", new)
        self.total_tokens = add.histogram("tgi_request_total_tokens", "Input and new tokens.", sequence)

        self.duration = add.duration("tgi_request_duration", "From call to end.")
        self.validation = add.duration("tgi_request_validation_duration", "From call to valid.")
        self.queue = add.duration("tgi_request_queue_duration", "From queued to prefill.")
        self.inference = add.duration("tgi_request_inference_duration", "From prefill to end.")
        self.mean_time_per_token = add.duration(
            "tgi_request_mean_time_per_token_duration", "From prefill to end, by new tokens."
        )
        self.time_to_first_token = add.duration("tgi_request_time_to_first_token_duration", "From call to first token.")
        self.time_per_output_token = add.duration(
            "tgi_request_time_per_output_token_duration", "From token to token after the first, on average."
        )


class _BatchMetrics:
    """What the engine does and holds, pass by pass."""

    def __init__(self, add: MetricFamilies, sizes: Sequence[float]) -> None:
        self.count = add.counter("tgi_batch_inference_count", "Passes.", _METHOD_LABELS)
        self.success = add.counter("tgi_batch_inference_success", "Passes that gave tokens.", _METHOD_LABELS)
        self.failure = add.counter("tgi_batch_inference_failure", "Passes that failed.", _STEP_FAILURE_LABELS)
        self.concatenation = add.counter("tgi_batch_concatenation_count", "Batches that joined another.")

        self.queue_jumps = add.counter("tgi_queue_jump", "Requests that joined before an earlier one.")
        self.granular = add.counter("tgi_granular_batch_addition", "Joined as others will have left in time.")
        self.prefill_weight = add.counter("tgi_prefill_weight_limit_exceeded", "Kept back from a large prefill.")
        self.prefill_padding = add.counter("tgi_prefill_padding_limit_exceeded", "Kept back for its padding.")

        self.size = add.histogram(
            "tgi_batch_inference_batch_size", "Rows that prefill, or decode.", sizes, _METHOD_LABELS
        )
        self.next_tokens = add.histogram("tgi_batch_next_tokens", "Tokens of prompts, with padding.", _POWERS_OF_TWO)
        self.duration = add.duration("tgi_batch_inference_duration", "From plan to tokens.", _STEP_LABELS)
        self.forward = add.duration("tgi_batch_inference_forward_duration", "Inside the engine.", _STEP_LABELS)
        self.tokproc = add.duration("tgi_batch_inference_tokproc_duration", "From tokens to text.", _STEP_LABELS)

        self.engine_up = add.gauge("tgi_engine_up", "Whether the engine is ready.")
        self.queue_size = add.gauge("tgi_queue_size", "Requests that wait.")
        self.current_size = add.gauge("tgi_batch_current_size", "Rows that run.")
        self.input_tokens = add.gauge("tgi_batch_input_tokens", "Tokens of context, with padding.")
        self.remaining_tokens = add.gauge("tgi_batch_max_remaining_tokens", "New tokens that rows may get.")
        self.weight_utilization = add.gauge("tgi_batch_weight_utilization", "Context by what memory holds.")
        self.context_limit = add.gauge("tgi_batch_context_limit", "Tokens of context that a batch may have.")

        self.preemptions = add.counter("tgi_batch_preemption", "Rows that gave their KV blocks to older ones.")
        self.prefix_queries = add.counter("tgi_prefix_cache_query_tokens", "Tokens that could have been cached.")
        self.prefix_hits = add.counter("tgi_prefix_cache_hit_tokens", "Tokens whose computation the cache saved.")

    def count_admissions(self, counts: AdmissionCounters) -> None:
        """Count how rows came to join."""
        self.queue_jumps.inc(counts.queue_jumps)
        self.granular.inc(counts.granular_additions)
        self.prefill_weight.inc(counts.prefill_weight_exceeded)
        self.prefill_padding.inc(counts.prefill_padding_exceeded)
        self.preemptions.inc(counts.preemptions)
        self.prefix_queries.inc(counts.prefix_cache_queries)
        self.prefix_hits.inc(counts.prefix_cache_hits)


class _AdapterMetrics:
    """Lookups of soft prompts and adapters that were not loaded yet."""

    def __init__(self, add: MetricFamilies) -> None:
        self.failure = add.counter("tgi_prompt_load_failure", "Soft prompts and adapters that could not be loaded.")
        self.duration = add.duration("tgi_prompt_load_duration", "To load a soft prompt or adapter.")


class _TokenizeMetrics:
    """Calls to Tokenize."""

    def __init__(self, add: MetricFamilies) -> None:
        self.count = add.counter("tgi_tokenize_request_count", "Calls to Tokenize.")
        self.input_count = add.counter("tgi_tokenize_request_input_count", "Inputs of calls to Tokenize.")
        self.tokens = add.histogram("tgi_tokenize_request_tokens", "Tokens of a call.", _POWERS_OF_TWO)
        self.duration = add.duration("tgi_tokenize_request_duration", "From call to reply.")
