"""Every `tgi_*` metric family: name, help, labels and buckets; and the text that Prometheus scrapes.

Names, labels and meanings are those of TGIS, but its two summaries are histograms here. Names that end in `duration`
are in seconds. `metrics.py` counts events in them.
"""

import bisect
import enum
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tgis.frontend.calls import CallKind
from tgis.ipc.messages import BatcherCounters, FailureKind

Labels = Mapping[str, Sequence[str]]  # label -> all of its values, none if they are not known in advance
NO_LABELS: Labels = {}
DURATION_BUCKETS = [float(f"{0.0001 * 1.5**k:.6g}") for k in range(1, 36)]  # 0.15 ms to 146 s

Wrapper = TypeVar("Wrapper", bound=MetricWrapperBase)


class CountedDuration(Collector):
    """A histogram of seconds that takes a value observed many times at once, not one by one as prometheus_client's."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = [*DURATION_BUCKETS, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        buckets = zip(map(floatToGoString, self._bounds), itertools.accumulate(self._counts), strict=True)
        yield HistogramMetricFamily(self._name, self._documentation, [*buckets], self._sum)


class MetricFamilies(Collector):
    """Makes a set of families, and exports every counter twice: as `x_total` and, untyped, as `x`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def scrape(self) -> bytes:
        """The text format of Prometheus, version 0.0.4; takes 25 ms, so call it in a thread."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Every family; without `_created` samples, which TGIS does not have."""
        for family in self.registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
            if family.type == "counter" and family.name.startswith("tgi_"):
                yield _untyped(family)

    def counter(self, name: str, documentation: str, labels: Labels = NO_LABELS) -> Counter:
        return _from_the_start(Counter(name, documentation, [*labels], registry=self.registry), labels)

    def gauge(self, name: str, documentation: str, labels: Labels = NO_LABELS) -> Gauge:
        return _from_the_start(Gauge(name, documentation, [*labels], registry=self.registry), labels)

    def histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Labels = NO_LABELS
    ) -> Histogram:
        return _from_the_start(
            Histogram(name, documentation, [*labels], buckets=buckets, registry=self.registry), labels
        )

    def duration(self, name: str, documentation: str, labels: Labels = NO_LABELS) -> Histogram:
        """A histogram of seconds."""
        return self.histogram(name, documentation, DURATION_BUCKETS, labels)


def _from_the_start(metric: Wrapper, labels: Labels) -> Wrapper:
    """Export the series of all labels at 0, as rates need it."""
    if labels:
        for values in itertools.product(*labels.values()):
            metric.labels(*values)
    return metric


def _untyped(counter: Metric) -> Metric:
    twin = Metric(counter.name, counter.documentation, "untyped")
    twin.samples = [sample._replace(name=counter.name) for sample in counter.samples]
    return twin


class FailureReason(enum.StrEnum):
    """Why a call failed; the last two are counted per input."""

    TOO_MANY = "conc_limit"
    VALIDATION = "validation"
    QUEUE_FULL = "queue_full"
    GENERATION = "generate"
    UNKNOWN = "unknown"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


class ServiceState(enum.StrEnum):
    """The service is in one of them at any time."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


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

_PROPOSERS: Labels = {"proposer": ["lookup", "draft"]}

_POWERS_OF_TWO_TO_64 = [2.0**k for k in range(7)]
_POWERS_OF_TWO = [2.0**k for k in range(6, 20)]
_INFO_LABELS: Labels = dict.fromkeys(
    ("version", "commit", "engine", "model", "dtype", "device", "quantize", "kv_cache_dtype", "fingerprint"), ()
)
_LORA_LABELS: Labels = dict.fromkeys(("max_lora", "running_lora_adapters", "waiting_lora_adapters"), ())


def linear_buckets(limit: int) -> list[float]:
    return [limit / 64 * k for k in range(1, 65)]


class RequestFamilies:
    """Calls to generate and their inputs."""

    def __init__(self, add: MetricFamilies, sequence: Sequence[float], new: Sequence[float]) -> None:
        self.count = add.counter("tgi_request_count", "Generation calls.", _KIND_LABELS)
        self.input_count = add.counter("tgi_request_input_count", "Inputs of generation calls.")
        self.failure = add.counter(
            "tgi_request_failure", "Failed calls; failed inputs if err is cancelled or timeout.", _FAILURE_LABELS
        )
        self.unknown_fields = add.counter("tgi_request_unknown_fields", "Unknown fields in OpenAI API requests.")
        self.success = add.counter("tgi_request_success", "Successful inputs.", _SUCCESS_LABELS)

        self.raw_length = add.histogram("tgi_request_raw_input_length", "Input tokens before truncation.", sequence)
        self.input_length = add.histogram("tgi_request_input_length", "Input tokens after truncation.", sequence)
        self.max_new_tokens = add.histogram("tgi_request_max_new_tokens", "Requested max_new_tokens.", new)
        self.generated_tokens = add.histogram(
            "tgi_request_generated_tokens", "Generated tokens of a successful input.", new
        )
        self.total_tokens = add.histogram(
            "tgi_request_total_tokens", "Input tokens plus generated tokens of a successful input.", sequence
        )

        self.duration = add.duration("tgi_request_duration", "Seconds from arrival to the end of a successful input.")
        self.validation = add.duration(
            "tgi_request_validation_duration", "Seconds from arrival to the end of validation of a valid call."
        )
        self.queue = add.duration("tgi_request_queue_duration", "Seconds in the queue, until the first step.")
        self.inference = add.duration(
            "tgi_request_inference_duration", "Seconds from the first step to the end of a successful input."
        )
        self.mean_time_per_token = add.duration(
            "tgi_request_mean_time_per_token_duration", "Seconds from the first step to the end, per generated token."
        )
        self.time_to_first_token = add.duration(
            "tgi_request_time_to_first_token_duration",
            "Seconds from arrival to the first token, including inputs that fail later.",
        )
        self.inter_token_latency = CountedDuration(
            "tgi_request_inter_token_latency_duration",
            "Seconds between two steps with tokens for the same input, including inputs that fail later.",
        )
        add.registry.register(self.inter_token_latency)
        self.time_per_output_token = add.duration(
            "tgi_request_time_per_output_token_duration", "Mean seconds between the tokens of a successful input."
        )


class SpeculationFamilies:
    """Tokens that are computed ahead."""

    def __init__(self, add: MetricFamilies) -> None:
        ahead = "Speculative tokens from prompt lookup or from SPECULATOR_NAME (draft)."
        proposed = add.counter("tgi_speculation_proposed_tokens", ahead, _PROPOSERS)
        accepted = add.counter("tgi_speculation_accepted_tokens", "Speculative tokens that were accepted.", _PROPOSERS)
        self.counters = [
            each.labels(proposer) for proposer in _PROPOSERS["proposer"] for each in (proposed, accepted)
        ]  # same order in BatcherCounters
        self.step_tokens = add.histogram(
            "tgi_speculation_step_tokens", "New tokens of a sequence in a speculative step.", _POWERS_OF_TWO_TO_64
        )

    def count_step_tokens(self, counts: BatcherCounters, tokens: list[list[int]]) -> None:
        """Count the new tokens of each sequence, if any were proposed."""
        for each in tokens if counts.proposed_tokens or counts.drafted_tokens else ():
            self.step_tokens.observe(len(each))


class BatchFamilies:
    """Steps of the engine, the running batch and the queue."""

    def __init__(self, add: MetricFamilies, sizes: Sequence[float]) -> None:
        self.count = add.counter("tgi_batch_inference_count", "Engine steps.", _METHOD_LABELS)
        self.success = add.counter("tgi_batch_inference_success", "Successful engine steps.", _METHOD_LABELS)
        self.failure = add.counter("tgi_batch_inference_failure", "Failed engine steps.", _STEP_FAILURE_LABELS)
        self.concatenation = add.counter("tgi_batch_concatenation_count", "Prefills that joined a running batch.")

        self.speculation = SpeculationFamilies(add)
        self.admissions = [  # same order in BatcherCounters
            add.counter("tgi_queue_jump", "Requests scheduled before an older request that did not fit."),
            add.counter("tgi_granular_batch_addition", "Requests that fit only because others will free memory."),
            add.counter("tgi_prefill_weight_limit_exceeded", "Times a request waited because of prefill size."),
            add.counter("tgi_prefill_padding_limit_exceeded", "Times a request waited because of padding."),
            add.counter("tgi_batch_preemption", "Preempted sequences, which lost their KV blocks."),
            add.counter("tgi_prefix_cache_query_tokens", "Tokens looked up in the prefix cache."),
            add.counter("tgi_prefix_cache_hit_tokens", "Tokens found in the prefix cache."),
            *self.speculation.counters,
        ]

        self.prompt_tokens = add.counter(
            "tgi_batch_prompt_tokens", "Input tokens, computed or found in the prefix cache; each counts once."
        )
        self.generated_tokens = add.counter("tgi_batch_generated_tokens", "Generated tokens, failed calls included.")
        self.discarded_tokens = add.counter(
            "tgi_batch_discarded_tokens",
            "Generated tokens that clients did not receive: cancelled or failed calls, or after a stop sequence.",
        )

        self.size = add.histogram(
            "tgi_batch_inference_batch_size", "Sequences that prefill or decode in a step.", sizes, _METHOD_LABELS
        )
        self.next_tokens = add.histogram(
            "tgi_batch_next_tokens", "Prompt tokens in a step, with padding.", _POWERS_OF_TWO
        )
        self.duration = add.duration("tgi_batch_inference_duration", "Seconds from scheduling to output.", _STEP_LABELS)
        self.forward = add.duration("tgi_batch_inference_forward_duration", "Seconds inside the engine.", _STEP_LABELS)
        self.tokproc = add.duration("tgi_batch_inference_tokproc_duration", "Seconds in the front end.", _STEP_LABELS)

        self.queue_size = add.gauge("tgi_queue_size", "Requests in the queue.")
        self.current_size = add.gauge("tgi_batch_current_size", "Sequences in the running batch.")
        self.input_tokens = add.gauge("tgi_batch_input_tokens", "Tokens in the running batch, with padding.")
        self.remaining_tokens = add.gauge("tgi_batch_max_remaining_tokens", "Tokens that the batch may still generate.")
        self.weight_utilization = add.gauge("tgi_batch_weight_utilization", "Used fraction of the token capacity.")
        self.context_limit = add.gauge("tgi_batch_context_limit", "Token capacity of a batch.")

    def count_admissions(self, counts: BatcherCounters) -> None:
        for counter, count in zip(self.admissions, msgspec.structs.astuple(counts), strict=True):
            counter.inc(count)


class AdapterFamilies:
    """Soft prompts and LoRA adapters that were not loaded yet."""

    def __init__(self, add: MetricFamilies) -> None:
        self.failure = add.counter("tgi_prompt_load_failure", "Soft prompts and LoRA adapters that failed to load.")
        self.duration = add.duration("tgi_prompt_load_duration", "Seconds to load a soft prompt or LoRA adapter.")


class TokenizeFamilies:
    """Calls to Tokenize."""

    def __init__(self, add: MetricFamilies) -> None:
        self.count = add.counter("tgi_tokenize_request_count", "Calls to Tokenize.")
        self.input_count = add.counter("tgi_tokenize_request_input_count", "Inputs of calls to Tokenize.")
        self.tokens = add.histogram("tgi_tokenize_request_tokens", "Tokens of a Tokenize call.", _POWERS_OF_TWO)
        self.duration = add.duration("tgi_tokenize_request_duration", "Seconds of a Tokenize call.")


class ServiceFamilies:
    """The service itself, from its first second: what runs, its state and credentials."""

    def __init__(self, add: MetricFamilies) -> None:
        self.info = add.gauge("tgi_info", "Model, engine and version, in the labels.", _INFO_LABELS)
        self.state = add.gauge("tgi_state", "1 for the state of the server, else 0.", {"state": [*ServiceState]})
        self.engine_up = add.gauge("tgi_engine_up", "1 while the engine is ready and healthy.")
        self.load_duration = add.gauge("tgi_model_load_duration", "Seconds from the start until the engine was ready.")
        self.block_size = add.gauge("tgi_kv_cache_block_size", "Tokens per KV block; 0 if the engine has no KV blocks.")
        self.num_blocks = add.gauge("tgi_kv_cache_blocks", "Number of KV blocks.")
        self.cache_bytes = add.gauge("tgi_kv_cache_bytes", "Maximum bytes of all KV blocks; 0 if the engine has none.")
        self.resident_cache = add.gauge("tgi_kv_cache_resident_bytes", "Bytes of memory that KV blocks use now.")
        self.certificate_expiry = add.gauge(
            "tgi_certificate_expiry_timestamp_seconds", "Expiry time of a certificate in use.", {"certificate": ()}
        )
        self.calls = add.counter(
            "tgi_call_count",
            "Finished calls, including refused calls.",
            {"api": (), "method": (), "status": ()},
        )
        self.max_batch_size = add.gauge("tgi_batch_max_size", "Maximum number of sequences in a batch.")
        self.authentication_failure = add.counter("tgi_authentication_failure", "Calls without a valid bearer token.")
        self.log_lines_dropped = add.counter("tgi_log_lines_dropped", "Dropped log lines that were not read in time.")
        self.running_adapters = add.gauge("tgi_lora_running_adapters", "LoRA adapters that running requests use.")
        self.waiting_adapters = add.gauge("tgi_lora_waiting_adapters", "LoRA adapters that only queued requests use.")
        self.lora_requests = add.gauge("tgi_lora_requests_info", "LoRA adapters by name, in the labels.", _LORA_LABELS)
        self.loop_lag = add.duration("tgi_event_loop_lag_duration", "Seconds of event-loop lag in the front end.")
