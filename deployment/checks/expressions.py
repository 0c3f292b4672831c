"""Every PromQL expression in deployment/ and what others ask of our metrics; the names of metrics in an expression."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

COMPONENTS = Path(__file__).parents[1] / "components"

# What OpenShift AI's dashboard asks of a runtime with the annotation opendatahub.io/kserve-runtime: tgis, with
# `namespace` and `pod` as selectors: odh-model-controller, internal/controller/constants/runtime-metrics.go.
OPENSHIFT_AI = {
    "successful requests": "round(sum(increase(tgi_request_success[5m])))",
    "failed requests": "round(sum(increase(tgi_request_failure[5m])))",
    **{
        name: f"sum by (pod) (rate({metric}_sum[1m])) / sum by (pod) (rate({metric}_count[1m]))"
        for name, metric in (
            ("inference latency", "tgi_request_inference_duration"),
            ("latency", "tgi_request_duration"),
        )
    },
}
PROMETHEUS = {"up"}  # what it makes itself
KUBELET = {"container_memory_working_set_bytes", "container_spec_memory_limit_bytes"}  # by cAdvisor
ADAPTERS = {"tgi_lora_requests_info"}  # only of an engine that takes LoRA adapters

_COMPARISON = re.compile(r"(.*\S) [<>] [\d.]+", re.DOTALL)
_NO_METRICS = re.compile(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|ignoring)\s*\([^)]*\)')
_WORD = re.compile(r"(?<![\w.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])")
_OPERATORS = {"and", "or", "unless", "by", "bool", "offset", "group_left"}


@dataclass(frozen=True)
class Expression:
    """An expression and where it is from."""

    origin: str
    text: str

    @property
    def metrics(self) -> set[str]:
        """The names of the metrics, some of them with the suffix of a series."""
        return set(_WORD.findall(_NO_METRICS.sub(" ", self.text))) - _OPERATORS

    @property
    def adds_replicas_of_other_bounds(self) -> bool:
        """Adds up buckets whose bounds follow from the limits of a replica."""
        of_durations = all(name.removesuffix("_bucket").endswith("_duration") for name in self._buckets)
        return not of_durations and re.search(r"\bby \((\w+, )*instance\b", self.text) is None

    @property
    def _buckets(self) -> list[str]:
        return [name for name in self.metrics if name.endswith("_bucket")]


def every_expression() -> list[Expression]:
    """Alerts without their comparison, which would hide what they compare."""
    openshift = (Expression(f"OpenShift AI: {name}", text) for name, text in OPENSHIFT_AI.items())
    return [*_alerts(), *_dashboard(), *_scaling(), *_endpoint_picker(), *openshift]


def _alerts() -> Iterator[Expression]:
    for group in yaml.safe_load((COMPONENTS / "alerts/rules.yaml").read_text())["spec"]["groups"]:
        for rule in group["rules"]:
            compared = _COMPARISON.fullmatch(rule["expr"])
            assert compared, f"{rule['alert']} does not end with a comparison"
            yield Expression(f"alert {rule['alert']}", compared[1])


def _dashboard() -> Iterator[Expression]:
    for panel in json.loads((COMPONENTS / "dashboard/dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            text = re.sub(r"\$(job|instance)", ".*", target["expr"]).replace("$__rate_interval", "1m")
            yield Expression(f"dashboard: {panel['title']} {target['legendFormat']}", text)


def _scaling() -> Iterator[Expression]:
    scaled = yaml.safe_load((COMPONENTS / "keda/scaled-object.yaml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        yield Expression("KEDA", trigger["metadata"]["query"])


def _endpoint_picker() -> Iterator[Expression]:
    config = yaml.safe_load((COMPONENTS / "inference-pool/endpoint-picker.yaml").read_text())
    for plugin in config["plugins"]:
        for engine in plugin.get("parameters", {}).get("engineConfigs", ()):
            for name, spec in engine.items():
                if name.endswith("Spec"):
                    yield Expression(f"endpoint picker: {name}", spec)
