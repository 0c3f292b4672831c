"""Prometheus metric families, exported as TGIS does. Knows no metric by name."""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = Mapping[str, Sequence[str]]  # label -> all of its values, none if they are not known in advance
NO_LABELS: Labels = {}
DURATION_BUCKETS = [float(f"{0.0001 * 1.5**k:.6g}") for k in range(1, 36)]  # 0.15 ms to 146 s

Wrapper = TypeVar("Wrapper", bound=MetricWrapperBase)


class CountedHistogram(Collector):
    """Takes a value that was observed many times at once, not one by one as prometheus_client's own."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = [*buckets, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        buckets = zip(map(floatToGoString, self._bounds), itertools.accumulate(self._counts), strict=True)
        yield HistogramMetricFamily(self._name, self._documentation, [*buckets], self._sum)


class MetricFamilies(Collector):
    """A set of families in which every counter is exported twice: as `x_total` and, untyped, as `x`."""

    def __init__(self) -> None:
        self._metrics: list[Collector] = []

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

    def counted_duration(self, name: str, documentation: str) -> CountedHistogram:
        """A histogram of seconds that many observe at once."""
        histogram = CountedHistogram(name, f"Seconds. {documentation}", DURATION_BUCKETS)
        self._metrics.append(histogram)
        return histogram

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


def exposition(registry: CollectorRegistry) -> Iterator[bytes]:
    """The text format of Prometheus, version 0.0.4, family by family: all of them take some 10 ms."""
    one = _OneFamily()
    for one.family in registry.collect():
        yield generate_latest(one)  # of a registry, it needs only this method


class _OneFamily:
    family: Metric

    def collect(self) -> list[Metric]:
        return [self.family]


def _untyped(counter: Metric) -> Metric:
    twin = Metric(counter.name, counter.documentation, "untyped")
    twin.samples = [sample._replace(name=counter.name) for sample in counter.samples]
    return twin
