"""`make manifests`: renders every overlay and component and checks them with real tools, then each check with a fault.

The tools are in .cache/manifests; fetch.sh fetches them. Nothing here needs a network or a cluster.
"""

import contextlib
import copy
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import consistency
import instances
import live
import schemas
import yaml
from consistency import Object
from schemas import TOOLS

from tgis.config import parse

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "deployment"
RULES_TEST = Path(__file__).parent / "alerts-test.yaml"
GRAFANA = ("@grafana/schema", "Dashboard")
TGIS_OVERLAYS = ROOT / "tests/support/tgis_overlays.yaml"
ALTERNATIVES = {"components/http-route": "components/inference-pool"}  # components that kustomize refuses together
# Options that an overlay here sets as TGIS's overlay does, if that sets them.
SAME_OPTIONS = (
    *("model_name", "dtype", "num_shard", "pt2_compile"),
    *("max_sequence_length", "max_new_tokens", "max_batch_size", "max_concurrent_requests"),
)


def main() -> None:
    with timed("render"):
        folders_alone = ("", *folders("overlays"), *folders("models"), "kserve")
        renderings = {name: render(DEPLOYMENT / name) for name in folders_alone}
        components = folders("components") - ALTERNATIVES.keys() - components_of_models()
        renderings["cuda-n and components"] = render_with("overlays/cuda-n", components)
        for name in ALTERNATIVES:
            renderings[f"base and {name}"] = render_with("base", {name})
        report({"cuda-n and components": image_problems(renderings["cuda-n and components"])})
        report({name: model_problems(name, renderings[f"models/{name}"]) for name in tgis_overlays()})
        in_one_namespace = {f"instance {name}": objects for name, objects in render_instances(components).items()}
        report({"in one namespace": instances.problems(list(in_one_namespace.values()))})
        renderings |= in_one_namespace
    with timed("schemas, types and consistency"):
        report({name: check(objects) for name, objects in renderings.items()})
    with timed("endpoint picker and dashboard"):
        report(configuration_problems(*configurations()))
    with timed("promtool"):
        check_rules(renderings["cuda-n and components"])
    with timed("hadolint"):
        run("bin/hadolint", ROOT / "Containerfile")
    with timed("planted faults"):
        names = "cuda-n and components", "kserve", "overlays/leader-worker-set"
        check_planted_faults([one for name in names for one in renderings[name]])
        check_planted_faults_of_instances(list(in_one_namespace.values()))
    with timed("Prometheus and a server under load"):
        report({"live": live.problems()})


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:6.1f} s  {what}", flush=True)


def report(problems: dict[str, list[str]]) -> None:
    lines = [f"{name or 'base'}: {problem}" for name, found in problems.items() for problem in found]
    if lines:
        raise SystemExit("\n".join(lines))


def run(tool: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    """What a tool prints; its failure ends this program with its message."""
    done = subprocess.run([TOOLS / tool, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{tool}: {done.stdout}{done.stderr}")
    return done.stdout


def folders(name: str) -> set[str]:
    return {f"{name}/{folder.name}" for folder in (DEPLOYMENT / name).iterdir()}


def render(folder: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(run("bin/kubectl", "kustomize", folder)) if one is not None]


def render_with(resource: str, components: set[str]) -> list[Object]:
    """Render an operator's kustomization with one resource."""
    image = {"name": "tgis", "newName": "registry.example/tgis", "newTag": "1.0"}
    return render_kustomization({"resources": [resource], "components": sorted(components), "images": [image]})


def render_kustomization(kustomization: Object) -> list[Object]:
    """Render an operator's kustomization; its folders are relative to deployment/."""
    with tempfile.TemporaryDirectory(dir=TOOLS) as name:
        directory = Path(name).resolve()
        to_deployment = os.path.relpath(DEPLOYMENT, directory)
        for field in {"resources", "components", "transformers"} & kustomization.keys():
            kustomization = kustomization | {field: [f"{to_deployment}/{folder}" for folder in kustomization[field]]}
        (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
        return render(directory)


def render_instances(components: set[str]) -> dict[str, list[Object]]:
    """Models for one namespace: two with every component, one of a user of TGIS, and one of each other kind of pod."""
    # Grafana needs one dashboard
    second = {ALTERNATIVES.get(name, name) for name in components} - {"components/dashboard"}
    prefixed = {"namePrefix": "granite-", "nameSuffix": "-8b"}
    return {
        "bloom": render_kustomization(copied_model("bloom", components)),
        "flan-t5": render_kustomization(copied_model("flan-t5", second)),
        "as in TGIS": render_kustomization(AS_IN_TGIS),
        "kserve": render_kustomization(prefixed | {"resources": ["kserve"]}),
        "leader-worker-set": render_kustomization(prefixed | {"resources": ["overlays/leader-worker-set"]}),
        "tls": render_kustomization(
            {"namePrefix": "tls-", "resources": ["overlays/tls-cert-manager"], "transformers": ["instance"]}
        ),
    }


def model_kustomizations() -> dict[str, Object]:
    """The kustomizations of models, with folders relative to deployment/."""
    texts = {folder.name: (folder / "kustomization.yaml").read_text() for folder in (DEPLOYMENT / "models").iterdir()}
    return {name: yaml.safe_load(text.replace("../../", "")) for name, text in texts.items()}


def components_of_models() -> set[str]:
    return {component for model in model_kustomizations().values() for component in model["components"]}


def copied_model(name: str, components: set[str]) -> Object:
    """An operator's copy of a model with more components, and a host name for the routes."""
    model = model_kustomizations()[name]
    host = {"op": "add", "path": "/spec/hostnames", "value": [f"{name}.example"]}
    patches = [*model.get("patches", ()), {"target": {"kind": "(GRPC|HTTP)Route"}, "patch": json.dumps([host])}]
    return model | {"components": [*model["components"], *sorted(components)], "patches": patches}


def tgis_overlays() -> dict[str, Object]:
    overlays: dict[str, Object] = yaml.safe_load(TGIS_OVERLAYS.read_text())["overlays"]
    return overlays


def model_problems(name: str, objects: list[Object]) -> list[str]:
    """Options and GPUs that differ from those of TGIS's overlay of this name."""
    overlay = {key: str(value) for key, value in tgis_overlays()[name]["env"].items()}
    (server,) = next(one for one in objects if one["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    wanted, config = (
        parse([], consistency.IMAGE_ENVIRONMENT | environ, "tgis serve")
        for environ in (overlay, {entry["name"]: entry["value"] for entry in server["env"]})
    )
    pairs = {option: (getattr(config, option), getattr(wanted, option)) for option in SAME_OPTIONS}
    pairs["GPUs"] = server["resources"]["limits"]["nvidia.com/gpu"], overlay["NUM_GPUS"]
    return [f"{what}: {value}, in TGIS {tgis}" for what, (value, tgis) in pairs.items() if value != tgis]


def check(objects: list[Object]) -> list[str]:
    return schemas.problems(objects) + consistency.problems(objects)


def image_problems(objects: list[Object]) -> list[str]:
    """The overlay's `images` reach every container, also those of components."""
    images = re.findall(r'"image": "([^"]+)"', json.dumps(objects))
    assert len(images) == 2
    return [f"{image} is not the overlay's" for image in images if image != "registry.example/tgis:1.0"]


def configurations() -> tuple[Any, Any]:
    """The dashboard and what the endpoint picker reads, which are no objects of Kubernetes."""
    components = DEPLOYMENT / "components"
    dashboard = json.loads((components / "dashboard/dashboard.json").read_text())
    return dashboard, yaml.safe_load((components / "inference-pool/endpoint-picker.yaml").read_text())


def configuration_problems(dashboard: Any, picker: Any) -> dict[str, list[str]]:
    return {
        "dashboard": schemas.typescript_problems([(GRAFANA, dashboard)]),
        "endpoint picker": [*schemas.written_down_problems(picker, "endpoint-picker.json")],
    }


def check_rules(objects: list[Object]) -> None:
    """promtool checks the rules and runs their tests; it takes the groups without the object around them."""
    (groups,) = [one["spec"] for one in objects if one["kind"] == "PrometheusRule"]
    (TOOLS / "rules.yaml").write_text(yaml.safe_dump(groups))
    (TOOLS / RULES_TEST.name).write_text(RULES_TEST.read_text())
    run("bin/promtool", "check", "rules", "rules.yaml", cwd=TOOLS)
    run("bin/promtool", "test", "rules", RULES_TEST.name, cwd=TOOLS)


def check_planted_faults(objects: list[Object]) -> None:
    for kind, plant, expected in FAULTS:
        faulty = copy.deepcopy(objects)
        plant(next(one for one in faulty if one["kind"] == kind))
        found = check(faulty)
        if len(found) != 1 or expected not in found[0]:
            raise SystemExit(f"planted {expected!r} in {kind}, found {found}")
    dashboard, picker = configurations()
    setter("Queue", "panels", 0, "titel")(dashboard)
    setter("tgi_queue_size", "plugins", 1, "parameters", "engineConfigs", 0, "queueSpec")(picker)
    if not all(configuration_problems(dashboard, picker).values()):
        raise SystemExit("a planted fault in the dashboard or the endpoint picker's configuration was not found")


def check_planted_faults_of_instances(rendered: list[list[Object]]) -> None:
    for kind, plant, expected in FAULTS_OF_INSTANCES:
        faulty = copy.deepcopy(rendered)
        plant(next(one for one in faulty[1] if one["kind"] == kind))
        if not any(expected in problem for problem in instances.problems(faulty)):
            raise SystemExit(f"planted {expected!r} in {kind}, found {instances.problems(faulty)}")


def setter(value: Any, *path: str | int | slice) -> Callable[[Any], None]:
    def plant(one: Any) -> None:
        for name in path[:-1]:
            one = one[name]
        one[path[-1]] = value

    return plant


UNKNOWN_OPTION = {"name": "MAX_BACH_SIZE", "value": "1"}
_POD = ("spec", "template", "spec")
_WORKER = ("spec", "leaderWorkerTemplate", "workerTemplate")
_SERVER = (*_POD, "containers", 0)
FAULTS: list[tuple[str, Callable[[Any], None], str]] = [
    # a misspelt field, by each of the schemas
    ("Deployment", setter(1, *_SERVER, "readinesProbe"), "'readinesProbe' was unexpected"),
    ("PodDisruptionBudget", setter(1, "spec", "maxUnavailabel"), "'maxUnavailabel' was unexpected"),
    ("ServiceMonitor", setter("15s", "spec", "endpoints", 0, "intervall"), '"intervall"'),
    ("PrometheusRule", setter("1m", "spec", "groups", 0, "rules", 0, "fore"), '"fore"'),
    ("ScaledObject", setter(1, "spec", "minReplicas"), '"minReplicas"'),
    ("GRPCRoute", setter([], "spec", "rules", 0, "backends"), '"backends"'),
    ("InferencePool", setter([], "spec", "targetPort"), "'targetPort' was unexpected"),
    ("ServingRuntime", setter(False, "spec", "multiModell"), "spec: unknown field multiModell"),
    ("ServingRuntime", setter(1, "spec", "containers", 0, "comand"), "'comand' was unexpected"),
    ("InferenceService", setter("", "spec", "predictor", "model", "runTime"), "unknown field runTime"),
    ("LeaderWorkerSet", setter("Never", "spec", "leaderWorkerTemplate", "restartPolicy"), "'Never' is not one of"),
    ("LeaderWorkerSet", setter(1, *_WORKER, "spec", "containers", 0, "comand"), "'comand' was unexpected"),
    # a kind that does not exist
    ("PodDisruptionBudget", setter("PodDisruptionBudgets", "kind"), "Couldn't find schema for kind"),
    ("PodMonitor", setter("PodMonitors", "kind"), "Cannot find module"),
    # what no schema knows
    ("Deployment", setter([UNKNOWN_OPTION], *_SERVER, "env", slice(0, 0)), "unknown option MAX_BACH_SIZE"),
    (
        "Deployment",
        setter(8033, *_SERVER, "readinessProbe", "httpGet", "port"),
        "readinessProbe asks /health on port 8033",
    ),
    ("ServingRuntime", setter(8034, "spec", "containers", 0, "ports", 0, "containerPort"), "not listen on port 8034"),
    ("GRPCRoute", setter(8034, "spec", "rules", 0, "backendRefs", 0, "port"), "there is no port 8034"),
    ("ServingRuntime", setter("tgis", "spec", "containers", 0, "image"), "untagged image tgis"),
]
BOTH = "selects Deployment bloom-inference-server, Deployment flan-t5-inference-server"
FAULTS_OF_INSTANCES: list[tuple[str, Callable[[Any], None], str]] = [  # in flan-t5
    ("Service", setter("bloom-inference-server", "metadata", "name"), "bloom-inference-server: in 2 objects"),
    ("Service", setter({"component": "text-gen-inference-server"}, "spec", "selector"), BOTH),
    ("Service", setter("text-gen-bloom", "spec", "selector", "app"), "selects Deployment bloom-inference-server"),
    ("GRPCRoute", setter(["bloom.example"], "spec", "hostnames"), "GRPCRoute of bloom.example for"),
    ("PodDisruptionBudget", setter("bloom", "spec", "selector", "matchLabels", "app"), "selects nothing"),
    ("ServiceMonitor", setter("bloom", "spec", "selector", "matchLabels", "app"), "selects nothing"),
    ("ScaledObject", setter("inference-server", "spec", "scaleTargetRef", "name"), "refers to inference-server"),
    ("PrometheusRule", setter('up{job="bloom"}', "spec", "groups", 0, "rules", 1, "expr"), "refers to bloom"),
]
# The form of TGIS's own overlays.
AS_IN_TGIS = {
    "namePrefix": "mpt-7b-",
    "commonLabels": {"app": "text-gen-mpt-7b"},
    "resources": ["base"],
    "patchesStrategicMerge": [
        """
        apiVersion: apps/v1
        kind: Deployment
        metadata:
          name: inference-server
        spec:
          template:
            spec:
              containers:
                - name: server
                  env:
                    - name: NUM_GPUS
                      value: "1"
        """
    ],
}

if __name__ == "__main__":
    main()
