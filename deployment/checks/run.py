"""`make manifests`: renders every overlay and component and checks them with real tools, then each check with a fault.

The tools are in .cache/manifests; fetch.sh fetches them. Nothing here needs a network or a cluster.
"""

import contextlib
import copy
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import consistency
import live
import schemas
import yaml
from consistency import Object
from schemas import TOOLS

ROOT = Path(__file__).parents[2]
DEPLOYMENT = ROOT / "deployment"
RULES_TEST = Path(__file__).parent / "alerts-test.yaml"
GRAFANA = ("@grafana/schema", "Dashboard")
ALTERNATIVES = {"http-route": "inference-pool"}  # components that kustomize refuses together


def main() -> None:
    with timed("render"):
        renderings = {name: render(DEPLOYMENT / name) for name in ("", *folders("overlays"), "kserve")}
        components = [name for name in folders("components") if Path(name).name not in ALTERNATIVES]
        renderings["cuda-n and components"] = render_with("overlays/cuda-n", components)
        for name in ALTERNATIVES:
            renderings[f"base and {name}"] = render_with("base", [f"components/{name}"])
        report({"cuda-n and components": image_problems(renderings["cuda-n and components"])})
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


def folders(name: str) -> list[str]:
    return sorted(f"{name}/{folder.name}" for folder in (DEPLOYMENT / name).iterdir())


def render(folder: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(run("bin/kubectl", "kustomize", folder)) if one is not None]


def render_with(resource: str, components: list[str]) -> list[Object]:
    """What somebody's own overlay gives."""
    with tempfile.TemporaryDirectory(dir=TOOLS) as directory:
        own = {
            "resources": [f"../../../deployment/{resource}"],
            "components": [f"../../../deployment/{name}" for name in components],
            "images": [{"name": "tgis", "newName": "registry.example/tgis", "newTag": "1.0"}],
        }
        (Path(directory) / "kustomization.yaml").write_text(json.dumps(own))
        return render(Path(directory))


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

if __name__ == "__main__":
    main()
