"""The `tgi_*` metrics of requests and steps: which exist, what they count, and the text that Prometheus scrapes.

Callers report events; only this module knows metric objects. Names, labels and meanings are those of TGIS, but
its two summaries are histograms here. Names that end in `duration` are in seconds.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter

from tgis.frontend.calls import CallKind
from tgis.frontend.prometheus import Labels, MetricFamilies, exposition
from tgis.ipc.messages import BatcherCounters, FailureKind, StepStats
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
    """On a registry of their own. Not thread-safe."""

    def __init__(
        self, *, max_sequence_length: int, max_new_tokens: int, max_batch_size: int, token_capacity: int
    ) -> None:
        """The limits set the histogram buckets; `token_capacity` is what a full batch holds."""
        families = MetricFamilies()
        self._requests = _RequestMetrics(
            families, _linear_buckets(max_sequence_length), _linear_buckets(max_new_tokens)
        )
        self._batches = _BatchMetrics(families, range(1, max_batch_size + 1))
        self._tokenize = _TokenizeMetrics(families)
        self._adapters = _AdapterMetrics(families)
        self._batches.context_limit.set(token_capacity)
        self._token_capacity = token_capacity
        self._num_new = 0  # queued requests that have never been scheduled
        self._num_requeued = 0  # requests that wait again after a failed step
        self._registry = CollectorRegistry()
        self._registry.register(families)

    def scrape(self) -> Iterator[bytes]:
        return exposition(self._registry)

    def request_started(self, kind: CallKind, num_inputs: int) -> None:
        """Count a call to generate, before any check."""
        self._requests.count.labels(kind).inc()
        self._requests.input_count.inc(num_inputs)

    def input_tokenized(self, raw_length: int) -> None:
        self._requests.raw_length.observe(raw_length)

    def request_validated(self, lengths: Sequence[int], max_new_tokens: int, duration: float) -> None:
        """Record a valid call: lengths of the inputs after truncation, seconds from its arrival."""
        for length in lengths:
            self._requests.input_length.observe(length)
            self._requests.max_new_tokens.observe(max_new_tokens)
        self._requests.validation.observe(duration)

    def request_failed(self, failure: FailureReason, count: int = 1) -> None:
        """Count a failed call, or `count` inputs that were cancelled or expired in the queue."""
        self._requests.failure.labels(failure).inc(count)

    def first_token(self, duration: float) -> None:
        """Record the first token of an input, in seconds from the arrival of its call."""
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
        """Record the end of an input, in seconds from the arrival of its call, its first step and its first token."""
        requests = self._requests
        requests.success.labels(reason.name, kind).inc()
        requests.generated_tokens.observe(generated_tokens)
        requests.total_tokens.observe(input_tokens + generated_tokens)
        requests.duration.observe(duration)
        requests.inference.observe(inference)
        requests.mean_time_per_token.observe(inference / generated_tokens if generated_tokens else 0.0)
        if generated_tokens > 1:
            requests.time_per_output_token.observe(decoding / (generated_tokens - 1))

    def inter_token_latencies(self, durations: Mapping[float, int]) -> None:
        """Record a step: seconds since the one that gave an input tokens before -> how many inputs got tokens now."""
        for seconds, count in durations.items():
            self._requests.inter_token_latency.observe(seconds, count)

    def tokens_discarded(self, count: int) -> None:
        """Count generated tokens that are in no answer."""
        _add(self._batches.discarded_tokens, count)

    def step_succeeded(self, stats: StepStats, generated_tokens: int, processing: float) -> None:
        """Record a step; `processing` is the seconds that the front end spent on its tokens."""
        batches = self._batches
        steps = batches.prefill if stats.prefill else batches.next_token
        steps.count.inc()
        steps.success.inc()
        steps.duration.observe(stats.duration)
        steps.forward.observe(stats.forward_duration)
        steps.tokproc.observe(processing)
        _add(batches.prompt_tokens, stats.prompt_tokens)
        batches.generated_tokens.inc(generated_tokens)
        if stats.prefill:
            batches.next_tokens.observe(stats.prefill_tokens)
            batches.prefill.size.observe(stats.num_prefills)
        if stats.num_decodes:  # in a prefill too, where the engine mixes them
            batches.next_token.size.observe(stats.num_decodes)
        _add(batches.concatenation, stats.concatenated)
        for seconds in stats.queue_durations:
            self._requests.queue.observe(seconds)
        batches.count_admissions(stats.counters)
        batches.context_limit.set(stats.token_capacity)
        self._set_batch_gauges(stats.num_running, stats.context_tokens, stats.remaining_tokens)
        self._num_requeued = stats.num_requeued
        self.set_queued(self._num_new)

    def set_queued(self, num_new: int) -> None:
        """Set the number of queued requests that have never been scheduled."""
        self._num_new = num_new
        self._batches.queue_size.set(num_new + self._num_requeued)

    def step_failed(self, kind: FailureKind, *, prefill: bool) -> None:
        """Count a step that failed as a whole."""
        self._batches.count.labels(_method(prefill)).inc()
        self._batches.failure.labels(_method(prefill), kind).inc()

    def engine_idle(self) -> None:
        """Reset the gauges: after cancels and failures no further step would."""
        self._set_batch_gauges(0, 0, 0)
        self._num_requeued = 0
        self.set_queued(0)

    def tokenize_started(self, num_inputs: int) -> None:
        self._tokenize.count.inc()
        self._tokenize.input_count.inc(num_inputs)

    def tokenize_succeeded(self, tokens: int, duration: float) -> None:
        self._tokenize.tokens.observe(tokens)
        self._tokenize.duration.observe(duration)

    def adapter_load_failed(self) -> None:
        self._adapters.failure.inc()

    def adapter_loaded(self, duration: float) -> None:
        self._adapters.duration.observe(duration)

    def _set_batch_gauges(self, num_running: int, context_tokens: int, remaining_tokens: int) -> None:
        self._batches.current_size.set(num_running)
        self._batches.input_tokens.set(context_tokens)
        self._batches.weight_utilization.set(context_tokens / self._token_capacity)
        self._batches.remaining_tokens.set(remaining_tokens)


def _method(prefill: bool) -> str:
    return "prefill" if prefill else "next_token"


def _add(counter: Counter, amount: int) -> None:
    """Nothing, nearly always."""
    if amount:
        counter.inc(amount)


def _linear_buckets(limit: int) -> list[float]:
    return [limit / 64 * k for k in range(1, 65)]


class _RequestMetrics:
    """Calls to generate and their inputs."""

    def __init__(self, add: MetricFamilies, sequence: Sequence[float], new: Sequence[float]) -> None:
        self.count = add.counter("tgi_request_count", "Calls to generate.", _KIND_LABELS)
        self.input_count = add.counter("tgi_request_input_count", "Inputs of calls to generate.")
        self.failure = add.counter(
            "tgi_request_failure", "Calls that failed; for cancelled and timeout, inputs.", _FAILURE_LABELS
        )
        self.success = add.counter("tgi_request_success", "Inputs that succeeded.", _SUCCESS_LABELS)

        self.raw_length = add.histogram("tgi_request_raw_input_length", "Input tokens before truncation.", sequence)
        self.input_length = add.histogram("tgi_request_input_length", "Input tokens after truncation.", sequence)
        self.max_new_tokens = add.histogram("tgi_request_max_new_tokens", "Maximum new tokens requested.", new)
        self.generated_tokens = add.histogram(
            "tgi_request_generated_tokens", "Generated tokens of inputs that succeeded.", new
        )
        self.total_tokens = add.histogram(
            "tgi_request_total_tokens", "Input and generated tokens of inputs that succeeded.", sequence
        )

        self.duration = add.duration("tgi_request_duration", "From arrival to the end, of inputs that succeeded.")
        self.validation = add.duration(
            "tgi_request_validation_duration", "From arrival to the end of validation, of valid calls."
        )
        self.queue = add.duration("tgi_request_queue_duration", "From submission to the first step.")
        self.inference = add.duration(
            "tgi_request_inference_duration", "From the first step to the end, of inputs that succeeded."
        )
        self.mean_time_per_token = add.duration(
            "tgi_request_mean_time_per_token_duration", "The same per generated token."
        )
        self.time_to_first_token = add.duration(
            "tgi_request_time_to_first_token_duration",
            "From arrival to the first token, whatever becomes of the input.",
        )
        self.inter_token_latency = add.counted_duration(
            "tgi_request_inter_token_latency_duration",
            "Between two steps that gave an input tokens, whatever becomes of it.",
        )
        self.time_per_output_token = add.duration(
            "tgi_request_time_per_output_token_duration", "Mean time between the tokens of an input that succeeded."
        )


class _BatchMetrics:
    """Steps of the engine, the running batch and the queue."""

    def __init__(self, add: MetricFamilies, sizes: Sequence[float]) -> None:
        self.count = add.counter("tgi_batch_inference_count", "Steps.", _METHOD_LABELS)
        self.success = add.counter("tgi_batch_inference_success", "Steps that succeeded.", _METHOD_LABELS)
        self.failure = add.counter("tgi_batch_inference_failure", "Steps that failed.", _STEP_FAILURE_LABELS)
        self.concatenation = add.counter("tgi_batch_concatenation_count", "Prefills that joined a running batch.")

        self.queue_jumps = add.counter("tgi_queue_jump", "Requests scheduled before one that did not fit.")
        self.granular = add.counter("tgi_granular_batch_addition", "Requests that fit as others end in time.")
        self.prefill_weight = add.counter("tgi_prefill_weight_limit_exceeded", "Requests kept out: prefill too large.")
        self.prefill_padding = add.counter("tgi_prefill_padding_limit_exceeded", "Requests kept out: too much padding.")

        self.prompt_tokens = add.counter(
            "tgi_batch_prompt_tokens", "Input tokens computed or found in the prefix cache, each once."
        )
        self.generated_tokens = add.counter("tgi_batch_generated_tokens", "Generated tokens, whatever becomes of them.")
        self.discarded_tokens = add.counter(
            "tgi_batch_discarded_tokens",
            "Those in no answer: of cancelled and failed calls, or after a stop sequence.",
        )

        self.size = add.histogram(
            "tgi_batch_inference_batch_size", "Sequences that prefill, or decode, in a step.", sizes, _METHOD_LABELS
        )
        self.next_tokens = add.histogram("tgi_batch_next_tokens", "Prompt tokens, with padding.", _POWERS_OF_TWO)
        self.duration = add.duration("tgi_batch_inference_duration", "From scheduling to output.", _STEP_LABELS)
        self.forward = add.duration("tgi_batch_inference_forward_duration", "Inside the engine.", _STEP_LABELS)
        self.tokproc = add.duration("tgi_batch_inference_tokproc_duration", "In the front end.", _STEP_LABELS)

        self.queue_size = add.gauge("tgi_queue_size", "Requests in the queue.")
        self.current_size = add.gauge("tgi_batch_current_size", "Sequences in the running batch.")
        self.input_tokens = add.gauge("tgi_batch_input_tokens", "Tokens in the batch, with padding.")
        self.remaining_tokens = add.gauge("tgi_batch_max_remaining_tokens", "Tokens still to be generated.")
        self.weight_utilization = add.gauge("tgi_batch_weight_utilization", "Tokens in the batch / capacity.")
        self.context_limit = add.gauge("tgi_batch_context_limit", "Capacity of a batch, in tokens.")

        self.preemptions = add.counter("tgi_batch_preemption", "Sequences that lost their KV blocks.")
        self.prefix_queries = add.counter("tgi_prefix_cache_query_tokens", "Tokens looked up in the prefix cache.")
        self.prefix_hits = add.counter("tgi_prefix_cache_hit_tokens", "Tokens found in the prefix cache.")
        self.prefill, self.next_token = (_StepMetrics(self, _method(prefill)) for prefill in (True, False))

    def count_admissions(self, counts: BatcherCounters) -> None:
        _add(self.queue_jumps, counts.queue_jumps)
        _add(self.granular, counts.granular_additions)
        _add(self.prefill_weight, counts.prefill_weight_exceeded)
        _add(self.prefill_padding, counts.prefill_padding_exceeded)
        _add(self.preemptions, counts.preemptions)
        _add(self.prefix_queries, counts.prefix_cache_queries)
        _add(self.prefix_hits, counts.prefix_cache_hits)


class _StepMetrics:
    """Those of one kind of steps: to find them by their labels takes as long as to count."""

    def __init__(self, batches: _BatchMetrics, method: str) -> None:
        self.count = batches.count.labels(method)
        self.success = batches.success.labels(method)
        self.size = batches.size.labels(method)
        labels = (method, "single_only")
        self.duration, self.forward = batches.duration.labels(*labels), batches.forward.labels(*labels)
        self.tokproc = batches.tokproc.labels(*labels)


class _AdapterMetrics:
    """Soft prompts and LoRA adapters that were not loaded yet."""

    def __init__(self, add: MetricFamilies) -> None:
        self.failure = add.counter("tgi_prompt_load_failure", "Soft prompts and LoRA adapters that failed.")
        self.duration = add.duration("tgi_prompt_load_duration", "Loading of a soft prompt or LoRA adapter.")


class _TokenizeMetrics:
    """Calls to Tokenize."""

    def __init__(self, add: MetricFamilies) -> None:
        self.count = add.counter("tgi_tokenize_request_count", "Calls to Tokenize.")
        self.input_count = add.counter("tgi_tokenize_request_input_count", "Inputs of calls to Tokenize.")
        self.tokens = add.histogram("tgi_tokenize_request_tokens", "Tokens of a call.", _POWERS_OF_TWO)
        self.duration = add.duration("tgi_tokenize_request_duration", "From arrival to the response.")
