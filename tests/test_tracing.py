"""Spans of requests, as a collector of OpenTelemetry's own protocol receives them from a server process."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from config_parsing import read, refusal
from harness import Server, running_fake, wait_until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tgis import tracing
from tgis.pb import generation_pb2 as pb

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = (("traceparent", f"00-{TRACE}-{PARENT}-00"), ("tracestate", "a=b"))
SECRET = "sesame"


class Collector(trace_grpc.TraceServiceServicer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[trace.ExportTraceServiceRequest] = []

    def Export(self, request: Any, context: Any) -> trace.ExportTraceServiceResponse:
        self.requests.append(request)
        return trace.ExportTraceServiceResponse()

    def resource(self) -> dict[str, str]:
        wait_until(lambda: bool(self.requests), "request")
        return {each.key: each.value.string_value for each in self.requests[0].resource_spans[0].resource.attributes}

    def spans(self, count: int) -> list[Span]:
        """Wait for so many, and forget them."""
        wait_until(lambda: len(self._received()) >= count, f"{count} spans")
        found = self._received()
        self.requests.clear()
        assert len(found) == count, [span.name for span in found]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))

    def _received(self) -> list[Span]:
        scopes = [scope for r in self.requests for each in r.resource_spans for scope in each.scope_spans]
        return [span for scope in scopes for span in scope.spans]


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, int]]:
    collecting, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_grpc.add_TraceServiceServicer_to_server(collecting, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collecting, port
    server.stop(0)


@pytest.fixture(scope="module")
def server(collector: tuple[Collector, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector[1]}", "OTEL_SERVICE_NAME": "mine"}
    options |= {"OTEL_RESOURCE_ATTRIBUTES": "team=a", "OTEL_BSP_SCHEDULE_DELAY": "100", "SERVED_MODEL_NAME": "served"}
    with running_fake(tmp_path_factory.mktemp("traced"), {"step_seconds": 0.01}, **options) as running:
        yield running


def attributes(span: Span) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in span.attributes}


def generate(server: Server, text: str, max_new_tokens: int, metadata: Any = ()) -> None:
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens))
    message = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=params)
    with server.stub() as stub:
        stub.Generate(message, timeout=20, metadata=metadata)


@pytest.mark.parametrize("api", ["grpc", "http"])
def test_the_spans_of_a_request(server: Server, collector: tuple[Collector, int], api: str) -> None:
    started = time.time_ns()
    if api == "grpc":
        generate(server, SECRET, 7, CONTEXT)
    else:
        body = {"model": "served", "prompt": SECRET, "max_tokens": 7, "temperature": 0}
        assert server.post("/v1/completions", body, 20, **dict(CONTEXT))[0] == 200
    ended = time.time_ns()
    request, *phases = spans = collector[0].spans(4)
    assert [span.name for span in spans] == ["generate", "queue", "prefill", "decode"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}  # although the caller has not sampled its own span
    assert (request.parent_span_id.hex(), request.kind) == (PARENT, Span.SPAN_KIND_SERVER)
    assert {span.parent_span_id for span in phases} == {request.span_id}
    times = [started, request.start_time_unix_nano, phases[0].start_time_unix_nano]
    times += [span.end_time_unix_nano for span in (*phases, request)] + [ended]
    assert times == sorted(times)
    assert [span.start_time_unix_nano for span in phases[1:]] == [span.end_time_unix_nano for span in phases[:-1]]
    decode = phases[2].end_time_unix_nano - phases[2].start_time_unix_nano
    assert decode >= 5 * 10_000_000  # six steps of 10 ms, of which the first may be heard of late
    found = attributes(request)
    assert [each.string_value for each in found.pop("gen_ai.response.finish_reasons").values] == ["max_tokens"]
    expected: dict[str, Any] = {"operation.name": "text_completion", "provider.name": "tgis", "request.model": "served"}
    expected |= {"request.max_tokens": 7, "usage.input_tokens": 6, "usage.output_tokens": 7}
    assert found.items() >= {f"gen_ai.{name}": value for name, value in expected.items()}.items()
    assert request.status.code == Status.STATUS_CODE_UNSET
    assert SECRET not in str(spans)


def test_a_failed_request(server: Server, collector: tuple[Collector, int]) -> None:
    junk = (("traceparent", "00-" + "x" * 1000), ("tracestate", "y" * 513))
    with pytest.raises(grpc.RpcError):
        generate(server, SECRET, 1_000_000, junk)
    resource = collector[0].resource()
    assert (resource["service.name"], resource["team"]) == ("mine", "a")
    (span,) = collector[0].spans(1)
    assert (attributes(span)["error.type"], span.status.code) == ("InvalidRequest", Status.STATUS_CODE_ERROR)
    assert (span.name, span.parent_span_id) == ("generate", b"")
    assert SECRET not in str(span)


@pytest.mark.parametrize(("endpoint", "count"), [("127.0.0.1:{port}", 1), ("127.0.0.1:1", 0)])
def test_the_last_spans_are_sent_at_the_end_and_a_dead_collector_delays_nothing(
    collector: tuple[Collector, int], monkeypatch: pytest.MonkeyPatch, endpoint: str, count: int
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    monkeypatch.setattr(tracing, "_FLUSH_SECONDS", 20.0 if count else 0.01)
    tracer = tracing.Tracer(endpoint.format(port=collector[1]), None, "m")
    tracer.record((), time.monotonic())
    tracer.close()
    assert len(collector[0]._received()) == len(collector[0].spans(count)) == count


def test_a_malformed_tracestate_is_not_logged(collector: tuple[Collector, int], caplog: Any) -> None:
    tracer = tracing.Tracer(f"127.0.0.1:{collector[1]}", None, "m")
    for state in ("A=sesame", "sesame=1,sesame=2", "=sesame", "sesame" * 50 + "=1"):
        tracer.record([("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", state)], time.monotonic())
    tracer.close()
    assert collector[0].resource()["service.name"] == "tgis"
    assert len(collector[0].spans(4)) == 4
    assert "sesame" not in caplog.text


def test_parent_headers_are_bounded() -> None:
    assert tracing.parent_headers([*((name.title(), value) for name, value in CONTEXT), ("other", "x")]) == dict(
        CONTEXT
    )
    assert tracing.parent_headers([("tracestate", "s" * 512)])
    others: Any = [("Traceparent", "1" * 56), ("TraceState", "s" * 513), ("traceparent", b"x")]
    assert tracing.parent_headers(others) == {}


def test_without_the_packages_there_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto", None)
    (warning,) = read(OTLP_ENDPOINT="c:1").warnings
    assert warning == "OTLP_ENDPOINT='c:1' has no effect: traces need the packages of the extra otel"
    assert refusal("--strict-options", OTLP_ENDPOINT="c:1") == f"STRICT_OPTIONS: {warning}"
