"""What no schema knows of manifests: options, ports, probes and images against the server; names against each other.

Takes the objects that kustomize renders, or those of the base, and needs none of the tools of `make manifests`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tgis.config import Config, parse
from tgis.errors import OptionError
from tgis.utils.options import declared_options

Object = dict[str, Any]

OPTIONS = {name.upper() for row in declared_options(Config) for name in row.names}
HUB_OPTIONS = {"HF_TOKEN"}  # of the download
IMAGE_ENVIRONMENT = {"PORT": "3000", "GRPC_PORT": "8033"}
PROBE_PATHS = {"/health"}
_TAGGED = re.compile(r".+[:@][\w.:-]+")


def problems(objects: Sequence[Object]) -> list[str]:
    """One line for each problem."""
    pods = [(object_name(one), pod) for one in objects if (pod := _pod(one))]
    found = [f"{name}: {problem}" for name, pod in pods for problem in _pod_problems(pod)]
    return found + [f"{object_name(one)}: {problem}" for one in objects for problem in _link_problems(one, objects)]


def object_name(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


def pod_template(one: Object) -> Object | None:
    """Metadata and spec of the pods that an object makes, or None."""
    template: Object | None = None
    match one["kind"]:
        case "Deployment":
            template = one["spec"]["template"]
        case "LeaderWorkerSet":
            template = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        case "ServingRuntime":
            template = {"metadata": {}, "spec": one["spec"]}
    return template


def _pod(one: Object) -> Object | None:
    template = pod_template(one)
    return template and template["spec"]


def _pod_problems(pod: Object) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        environ = {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}
        yield from (f"unknown option {name}" for name in environ if name not in OPTIONS | HUB_OPTIONS)
        if not _TAGGED.fullmatch(container["image"]):
            yield f"untagged image {container['image']}"
        yield from (f"no volume {mount['name']}" for mount in container["volumeMounts"] if mount["name"] not in volumes)
    for container in pod["containers"]:
        yield from _server_problems(container)


def _server_problems(container: Object) -> Iterator[str]:
    environ = {entry["name"]: entry["value"] for entry in container["env"] if entry["name"] in OPTIONS}
    try:
        config = parse([], IMAGE_ENVIRONMENT | environ, "tgis serve")
    except OptionError as error:
        yield str(error)
        return
    yield from config.warnings
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listening = {config.port, config.grpc_port, config.http_api_port}
    yield from (f"the server does not listen on port {port}" for port in ports.values() if port not in listening)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]["httpGet"]
        if ports.get(probe["port"], probe["port"]) != config.port or probe["path"] not in PROBE_PATHS:
            yield f"{name} asks {probe['path']} on port {probe['port']}"


def _link_problems(one: Object, objects: Sequence[Object]) -> Iterator[str]:
    """Ports and names that refer to other objects."""
    services = {other["metadata"]["name"]: other["spec"]["ports"] for other in objects if other["kind"] == "Service"}
    of_pods = [port for other in objects if (pod := _pod(other)) for c in pod["containers"] for port in c["ports"]]
    names = {port["name"] for port in of_pods}
    spec = one.get("spec", {})
    match one["kind"]:
        case "Service":
            wanted = [(port.get("targetPort", port["port"]), names) for port in spec["ports"]]
        case "ServiceMonitor":
            exported = {port["name"] for ports in services.values() for port in ports}
            wanted = [(endpoint["port"], exported) for endpoint in spec["endpoints"]]
        case "PodMonitor":
            wanted = [(endpoint["port"], names) for endpoint in spec["podMetricsEndpoints"]]
        case "InferencePool":
            wanted = [(port["number"], {port["containerPort"] for port in of_pods}) for port in spec["targetPorts"]]
        case "NetworkPolicy":
            wanted = [(port["port"], names | {"https"}) for rule in spec["ingress"] for port in rule.get("ports", ())]
        case "GRPCRoute" | "HTTPRoute":
            backends = [each for rule in spec["rules"] for each in rule["backendRefs"] if "kind" not in each]
            wanted = [(each["port"], {port["port"] for port in services.get(each["name"], ())}) for each in backends]
        case _:
            wanted = []
    yield from (f"there is no port {port}" for port, known in wanted if port not in known)
