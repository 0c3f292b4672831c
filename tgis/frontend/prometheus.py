"""Prometheus metric families, exported as TGIS does. Knows no metric by name."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

Labels = Mapping[str, Sequence[str]]  # label -> all of its values, none if they are not known in advance
NO_LABELS: Labels = {}
DURATION_BUCKETS = [float(f"{0.0001 * 1.5**k:.6g}") for k in range(1, 36)]  # 0.15 ms to 146 s

Wrapper = TypeVar("Wrapper", bound=MetricWrapperBase)


class MetricFamilies(Collector):
    """A set of families in which every counter is exported twice: as `x_total` and, untyped, as `x`."""

    def __init__(self) -> None:
        self._metrics: list[MetricWrapperBase] = []

    def counter(self, name: str, documentation: str, labels: Labels = NO_LABELS) -> Counter:
        return self._add(Counter(name, documentation, [*labels], registry=None), labels)

    def gauge(self, name: str, documentation: str, labels: Labels = NO_LABELS) -> Gauge:
        return self._add(Gauge(name, documentation, [*labels], registry=None), labels)

    def histogram(
        self, name: str, documentation: str, buckets: Sequence[float], labels: Labels = NO_LABELS
    ) -> Histogram:
        return self._add(Histogram(name, documentation, [*labels], buckets=buckets, registry=None), labels)

    def duration(self, name: str, documentation: str, labels: Labels = NO_LABELS) -> Histogram:
        """A histogram of seconds."""
        return self.histogram(name, f"Seconds. {documentation}", DURATION_BUCKETS, labels)

    def _add(self, metric: Wrapper, labels: Labels) -> Wrapper:
        if labels:
            for values in itertools.product(*labels.values()):
                metric.labels(*values)  # exported from the start, at 0, as rates need it
        self._metrics.append(metric)
        return metric

    def collect(self) -> Iterator[Metric]:
        """Drop the `_created` samples, which TGIS does not have, and add the untyped twins."""
        for metric in self._metrics:
            for family in metric.collect():
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family
                if family.type == "counter":
                    yield _untyped(family)


def _untyped(counter: Metric) -> Metric:
    twin = Metric(counter.name, counter.documentation, "untyped")
    twin.samples = [sample._replace(name=counter.name) for sample in counter.samples]
    return twin
