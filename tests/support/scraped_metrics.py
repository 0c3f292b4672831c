"""Samples of a metrics scrape."""

import re

from tgis.frontend.metrics import Metrics, ServiceMetrics
from tgis.frontend.validation import RequestLimits
from tgis.ipc.messages import EngineInfo

INFO = EngineInfo("fake", "M", "cpu", "float32", 99, False, False, 4, 1000, 64, lora_targets={"q_proj": (1, 1)})

Series = frozenset[tuple[str, str]]


def make_metrics() -> Metrics:
    return Metrics(RequestLimits(max_sequence_length=96, max_new_tokens=32, include_stop_sequence=True), INFO)


def full_scrape() -> str:
    """With every series that there can be, but for those of processes."""
    service = ServiceMetrics("1", "abc", "model")
    service.engine_ready(INFO, 1.0)
    service.call_ended("grpc", "Generate", "OK")
    service.set_certificate_expiry({"server": 1.0})
    service.set_lora_adapters({"a"}, {"b"})
    return (service.scrape() + make_metrics().scrape()).decode()


def samples(metrics: Metrics | ServiceMetrics) -> dict[str, dict[Series, float]]:
    """Every sample of a scrape: name as in the text, labels, value."""
    found: dict[str, dict[Series, float]] = {}
    for line in metrics.scrape().decode().splitlines():
        if not line.startswith("#"):
            head, value = line.rsplit(" ", 1)
            name, _, labels = head.partition("{")
            key = frozenset(re.findall(r'(\w+)="([^"]*)"', labels))
            assert key not in found.setdefault(name, {})
            found[name][key] = float(value)
    return found


def value(metrics: Metrics | ServiceMetrics, name: str, **labels: str) -> float:
    return samples(metrics)[name][frozenset(labels.items())]
