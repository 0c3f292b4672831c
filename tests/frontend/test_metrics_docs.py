"""docs/metrics.md against a scrape."""

import re

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from repository import REPOSITORY
from scraped_metrics import full_scrape

DOCS = (REPOSITORY / "docs" / "metrics.md").read_text()


def test_the_tables_have_every_metric_as_it_is() -> None:
    rows = set(re.findall(r"^\| `tgi_.*$", DOCS, re.MULTILINE))
    families = [family for family in text_string_to_metric_families(full_scrape()) if family.name.startswith("tgi_")]
    assert rows == {
        f"| `{family.name}` | {family.type} |{_labels(family.samples)} | {family.documentation} |"
        for family in families
        if family.type != "unknown"  # the twins of counters
    }


def _labels(samples: list[Sample]) -> str:
    names = sorted({label for sample in samples for label in sample.labels} - {"le"})
    return " " * bool(names) + ", ".join(f"`{name}`" for name in names)


def test_names_beside_the_tables_are_of_metrics() -> None:
    exported = {re.split(r"[{ ]", line)[0] for line in full_scrape().splitlines()}
    named = set(re.findall(r"`(tgi_(?!engine_process)\w+)`", DOCS))
    assert len(named) > 50
    assert {name for name in named if not {name, f"{name}_count"} & exported} == set()
