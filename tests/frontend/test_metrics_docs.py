"""docs/metrics.md against a scrape."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from repository import REPOSITORY
from scraped_metrics import make_metrics

from tgis.frontend.metrics import ServiceMetrics
from tgis.ipc.messages import EngineInfo

DOCS = (REPOSITORY / "docs" / "metrics.md").read_text()
INFO = EngineInfo("fake", "M", "cpu", "float32", 99, False, False, 4, 1000, 64, lora_targets={"q_proj": (1, 1)})


@pytest.fixture(scope="module")
def scrape() -> str:
    """With every series that there can be."""
    service = ServiceMetrics("1", "abc", "model")
    service.engine_ready(INFO, 1.0)
    service.set_certificate_expiry({"server": 1.0})
    service.set_lora_adapters({"a"}, {"b"})
    return b"".join([*service.scrape(), *make_metrics().scrape()]).decode()


def test_the_tables_have_every_metric_as_it_is(scrape: str) -> None:
    rows = set(re.findall(r"^\| `tgi_.*$", DOCS, re.MULTILINE))
    families = [family for family in text_string_to_metric_families(scrape) if family.name.startswith("tgi_")]
    assert rows == {
        f"| `{family.name}` | {family.type} |{_labels(family.samples)} | {family.documentation} |"
        for family in families
        if family.type != "unknown"  # the twins of counters
    }


def _labels(samples: list[Sample]) -> str:
    names = sorted({label for sample in samples for label in sample.labels} - {"le"})
    return " " * bool(names) + ", ".join(f"`{name}`" for name in names)


def test_expressions_are_of_series_that_exist(scrape: str) -> None:
    expressions = re.findall(r"^\| [^`]+ \| `(.*)` \|$", DOCS, re.MULTILINE)
    assert len(expressions) > 5
    series = {line.partition("{")[0].partition(" ")[0] for line in scrape.splitlines()}
    assert {name for text in expressions for name in re.findall(r"tgi_\w+", text)} <= series
