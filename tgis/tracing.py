"""OpenTelemetry: the spans of a request, made when it has ended, and sent to a collector over OTLP in the background.

The packages are in the extra `otel`. Spans never have text of requests.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

PARENT_HEADERS = {"traceparent": 55, "tracestate": 512}  # W3C's headers, and how long they may be
_FLUSH_SECONDS = 2.0
_SERVICE, _SPAN = "tgis", "generate"

Phase = tuple[str, float, float]  # name, start and end of a phase of a request, in `time.monotonic()`
Headers = Iterable[tuple[str, str | bytes]]


def parent_headers(headers: Headers) -> dict[str, str]:
    """W3C's trace context in the metadata or headers of a call, if it is not too long."""
    found = ((name.lower(), value) for name, value in headers)
    return {
        name: value for name, value in found if isinstance(value, str) and len(value) <= PARENT_HEADERS.get(name, 0)
    }


def can_trace() -> bool:
    """Whether the packages are there."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:
        return False


class Tracer:
    """Makes spans; a collector that does not answer delays nothing, and costs a bounded number of waiting spans."""

    def __init__(self, endpoint: str, service_name: str | None, model: str) -> None:
        # Without the option nothing of it is imported.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

        # Its warnings quote a client's tracestate.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        named = OTELResourceDetector().detect().attributes  # attributes of OTEL_RESOURCE_ATTRIBUTES
        resource = Resource.create({"service.name": service_name or named.get("service.name") or _SERVICE})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # its shutdown could take 10 s
        exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https:"))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE)
        self._common = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": _SERVICE,
            "gen_ai.request.model": model,
        }

    def record(
        self,
        headers: Headers,
        started: float,
        phases: Iterable[Phase] = (),
        attributes: Mapping[str, Any] | None = None,
        error: str | None = None,
    ) -> None:
        """The span of a request that ends now, `error` if it failed so, and those of its phases.

        Its `headers` may say which span it belongs to. `started` is a value of `time.monotonic()`.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        epoch = time.time() - time.monotonic()
        context = TraceContextTextMapPropagator().extract(parent_headers(headers))
        found = {**self._common, **(attributes or {}), **({"error.type": error} if error else {})}
        span = self._tracer.start_span(_SPAN, context, SpanKind.SERVER, found, start_time=_nanoseconds(epoch + started))
        if error:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for name, start, end in phases:
            child = self._tracer.start_span(name, inside, start_time=_nanoseconds(epoch + start))
            child.end(_nanoseconds(epoch + end))
        span.end()

    def close(self) -> None:
        """Send the spans that are left, for at most two seconds."""
        sending = threading.Thread(target=self._provider.force_flush, daemon=True)  # retries for longer than that
        sending.start()
        sending.join(_FLUSH_SECONDS)


def make_tracer(endpoint: str | None, service_name: str | None, model: str) -> Tracer | None:
    """A tracer; None without an endpoint or the packages, of which the options have warned."""
    return Tracer(endpoint, service_name, model) if endpoint and can_trace() else None


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
