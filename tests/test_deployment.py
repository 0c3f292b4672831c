"""Kubernetes manifests, alerts and the dashboard, as far as no tool is needed; `make manifests` checks the rest."""

import re
from pathlib import Path
from typing import Any

import consistency
import expressions
import yaml
from scraped_metrics import full_scrape

from tgis.config import parse

DEPLOYMENTS = Path(__file__).parents[1] / "deployment"


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOYMENTS / name).read_text())
    return loaded


POD = load("base/deployment.yaml")["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
# What kustomize would render of the base with every component that adds an object, and KServe's.
OBJECTS = [
    one
    for path in sorted(DEPLOYMENTS.rglob("*.yaml"))
    if not {"overlays", "models", "instance", "checks", "kustomizeconfig.yaml"} & set(path.parts)
    for one in yaml.safe_load_all(path.read_text())
    if one["kind"] not in ("Kustomization", "Component", "EndpointPickerConfig")
    and ("components" not in path.parts or one["kind"] not in ("Deployment", "Service"))
]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container.get("env", ())}


def test_manifests_agree_with_the_server_and_with_each_other() -> None:
    assert len(OBJECTS) > 12
    assert consistency.problems(OBJECTS) == []


def test_the_pod_can_write_only_to_tmp_and_drains_within_its_grace() -> None:
    config = parse([], environment(SERVER), "tgis serve")
    writable = [mount["mountPath"] for mount in SERVER["volumeMounts"] if not mount.get("readOnly")]
    assert (writable, SERVER["securityContext"]["readOnlyRootFilesystem"]) == (["/tmp"], True)
    assert config.cache_dir.is_relative_to("/tmp")
    (_, seconds) = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    exit_seconds = 10  # of the engine process and what is left in the front end
    assert int(seconds) + config.shutdown_grace_seconds + exit_seconds <= POD["terminationGracePeriodSeconds"]


def test_the_download_puts_the_served_model_where_the_server_finds_it() -> None:
    changes = load("components/download-weights/deployment.yaml")["spec"]["template"]["spec"]
    (init,), (served,) = changes["initContainers"], changes["containers"]
    environ = {entry["name"]: entry.get("value") for entry in init["env"]}
    assert environment(served) == {"MODEL_NAME": environ["MODEL_NAME"]}
    assert environ["HF_HUB_CACHE"] == str(parse([], environment(SERVER), "tgis serve").hub_cache)
    assert init["command"] == ["tgis", "download-weights", "$(MODEL_NAME)"]
    assert (init["image"], init["securityContext"]) == (SERVER["image"], SERVER["securityContext"])


def test_every_expression_is_of_metrics_that_the_server_exports() -> None:
    """The expressions of alerts, dashboard, KEDA, the endpoint picker and OpenShift AI."""
    exported = {re.split(r"[{ ]", line)[0] for line in full_scrape().splitlines() if not line.startswith("#")}
    exported |= expressions.PROMETHEUS | expressions.KUBELET
    assert len(expressions.every_expression()) > 50
    for expression in expressions.every_expression():
        assert expression.metrics, expression
        assert {name for name in expression.metrics if "process_" not in name} <= exported, expression
        assert not expression.adds_replicas_of_other_bounds, expression


def test_alerts_are_tested_and_explained() -> None:
    (group,) = load("components/alerts/rules.yaml")["spec"]["groups"]
    tested = re.findall(r"^ +alertname: (\w+)$", (DEPLOYMENTS / "checks/alerts-test.yaml").read_text(), re.MULTILINE)
    assert sorted(tested) == sorted(rule["alert"] for rule in group["rules"])
    explained = (DEPLOYMENTS.parent / "docs" / "deploying.md").read_text()
    assert [rule["alert"] for rule in group["rules"] if f"| `{rule['alert']}` |" not in explained] == []
