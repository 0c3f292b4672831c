"""Several models in one namespace: no shared names, no selector of two models' pods, no reference to another model."""

import collections
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from consistency import Object, object_name, pod_template

_INSTANCE_NAME = re.compile(r"[\w-]*inference-server[\w-]*")
_JOB = re.compile(r'\bjob="([^"]*)"')
_COMPONENT = "text-gen-inference-server"  # of all instances, as in TGIS
_LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # set by the controller, as is the name of the set
_SET_NAME = "leaderworkerset.sigs.k8s.io/name"


def problems(instances: Sequence[Sequence[Object]]) -> list[str]:
    """One line for each problem of the instances, if all are in one namespace."""
    manifests = [manifest for instance in instances for manifest in instance]
    references = [line for instance in instances for line in _reference_problems(instance)]
    return [*_shared_names(manifests), *_selector_problems(manifests), *references]


def _shared_names(manifests: Sequence[Object]) -> Iterator[str]:
    names = collections.Counter(name for manifest in manifests for name in _names(manifest))
    yield from (f"{name}: in {count} objects" for name, count in names.items() if count > 1)


def _names(manifest: Object) -> Iterator[str]:
    """What only one object may have: name, dashboard, requests that a Gateway routes there."""
    yield object_name(manifest)
    if dashboard := manifest.get("data", {}).get("dashboard.json"):
        yield f"dashboard {json.loads(dashboard)['uid']}"
    if manifest["kind"].endswith("Route"):
        matches = [match for rule in manifest["spec"]["rules"] for match in rule["matches"]]
        for host in manifest["spec"].get("hostnames", ["any host"]):
            yield from (f"{manifest['kind']} of {host} for {json.dumps(match)}" for match in matches)


def _selector_problems(manifests: Sequence[Object]) -> Iterator[str]:
    """Selectors of the pods of none or of several objects; a ServiceMonitor selects pods through Services."""
    labels = {object_name(manifest): _pod_labels(manifest) for manifest in manifests if pod_template(manifest)}
    services = [manifest for manifest in manifests if manifest["kind"] == "Service"]
    for manifest in manifests:
        for selector in _selectors(manifest.get("spec")):
            pod_selectors = [selector]
            if manifest["kind"] == "ServiceMonitor":
                pod_selectors = [s["spec"]["selector"] for s in services if _matches(selector, s["metadata"]["labels"])]
            selected = {name for name in labels for wanted in pod_selectors if _matches(wanted, labels[name])}
            if len(selected) != 1:
                yield f"{object_name(manifest)} selects {', '.join(sorted(selected)) or 'nothing'}"


def _pod_labels(manifest: Object) -> dict[str, str]:
    template = pod_template(manifest)
    assert template is not None
    labels: dict[str, str] = template["metadata"].get("labels", {})
    if manifest["kind"] == "LeaderWorkerSet":
        labels = labels | _LEADER | {_SET_NAME: manifest["metadata"]["name"]}
    return labels


def _selectors(value: Any) -> Iterator[dict[str, str]]:
    """The labels of all selectors of pods or Services in a value; {} selects everything and is none."""
    if isinstance(value, list):
        yield from (labels for item in value for labels in _selectors(item))
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in ("selector", "podSelector", "labelSelector"):
                yield from _selectors(item)
            elif labels := item.get("matchLabels", {} if "matchExpressions" in item else item):
                yield labels


def _matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def _reference_problems(instance: Sequence[Object]) -> Iterator[str]:
    """Names in any text, and jobs in expressions, that are not of this instance."""
    names = {manifest["metadata"]["name"] for manifest in instance} | {_COMPONENT}
    jobs = {manifest["metadata"]["labels"]["app"] for manifest in instance if manifest["kind"] == "Service"}
    for manifest in instance:
        texts = list(_texts(manifest))
        referred = {name for text in texts for name in _INSTANCE_NAME.findall(_JOB.sub("", text))} - names
        referred |= {job for text in texts for job in _JOB.findall(text)} - jobs
        yield from (f"{object_name(manifest)} refers to {name}" for name in sorted(referred))


def _texts(value: Any) -> Iterator[str]:
    """All strings of a value but the label `app`; the label `job` as an expression has it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (text for item in value for text in _texts(item))
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "app":
                yield from [f'job="{item}"'] if key == "job" else _texts(item)
