"""Kubernetes manifests, alerts and the dashboard.

`make manifests` checks manifests with real tools; here are the checks that need none.
"""

import copy
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import consistency
import expressions
import grpc
import pytest
import yaml
from expressions import Expression
from harness import Server, running_fake, unary_request
from scraped_metrics import full_scrape

from tgis import __version__
from tgis.__main__ import COMMANDS
from tgis.config import Config, parse
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

ROOT = Path(__file__).parents[1]


DEPLOYMENTS = ROOT / "deployment"


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOYMENTS / name).read_text())
    return loaded


DEPLOYMENT = load("base/deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]


# What kustomize would render of the base with every component that adds an object, and KServe's.
OBJECTS = [
    one
    for path in sorted(DEPLOYMENTS.rglob("*.yaml"))
    if "overlays" not in path.parts and "checks" not in path.parts
    for one in yaml.safe_load_all(path.read_text())
    if one["kind"] not in ("Kustomization", "Component", "EndpointPickerConfig")
    and ("components" not in path.parts or one["kind"] not in ("Deployment", "Service"))
]


@pytest.fixture(scope="module")
def config() -> Config:
    environ = environment(SERVER)
    assert all(isinstance(value, str) for value in environ.values())  # Kubernetes accepts only strings
    return parse([], environ, "tgis serve")


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container.get("env", ())}


def inherited_environment(folder: Path) -> dict[str, str]:
    """What the overlays that an overlay is based on set, and the base."""
    resources = yaml.safe_load((folder / "kustomization.yaml").read_text()).get("resources", [])
    for parent in (folder / name for name in resources):
        if (parent / "deployment.yaml").exists() and "base" not in parent.parts:
            (container,) = load(str(parent / "deployment.yaml"))["spec"]["template"]["spec"]["containers"]
            return inherited_environment(parent) | environment(container)
    return environment(SERVER)


def test_manifests_agree_with_the_server_and_with_each_other() -> None:
    assert len(OBJECTS) > 12
    assert consistency.problems(OBJECTS) == []


@pytest.mark.parametrize(
    ("kind", "path", "value", "problem"),
    [
        ("Deployment", "env 0 name", "MAX_BACH_SIZE", "unknown option MAX_BACH_SIZE"),
        ("Deployment", "env 3 value", "many", "MAX_BATCH_SIZE"),
        ("Deployment", "ports 0 containerPort", 3001, "does not listen on port 3001"),
        ("Deployment", "startupProbe httpGet port", "grpc", "startupProbe asks /health on port grpc"),
        ("Deployment", "livenessProbe httpGet path", "/healthz", "livenessProbe asks /healthz"),
        ("Deployment", "image", "registry.example:5000/tgis", "untagged image"),
        ("Deployment", "volumeMounts 0 name", "model", "no volume model"),
        ("ServingRuntime", "ports 0 containerPort", 8080, "does not listen on port 8080"),
        ("Service", "spec ports 0 targetPort", "http2", "no port http2"),
        ("ServiceMonitor", "spec endpoints 0 port", "metrics", "no port metrics"),
        ("PodMonitor", "spec podMetricsEndpoints 0 port", "metrics", "no port metrics"),
        ("NetworkPolicy", "spec ingress 0 ports 0 port", "h2", "no port h2"),
        ("InferencePool", "spec targetPorts 0 number", 8000, "no port 8000"),
        ("GRPCRoute", "spec rules 0 backendRefs 0 port", 3000, "no port 3000"),
    ],
)
def test_a_planted_fault_is_found(kind: str, path: str, value: object, problem: str) -> None:
    objects = copy.deepcopy(OBJECTS)
    target: Any = next(one for one in objects if one["kind"] == kind)
    if kind in ("Deployment", "ServingRuntime"):
        pod = target["spec"] if kind == "ServingRuntime" else target["spec"]["template"]["spec"]
        (target,) = pod["containers"]
    *parents, last = [int(name) if name.isdecimal() else name for name in path.split()]
    for name in parents:
        target = target[name]
    target[last] = value
    found = consistency.problems(objects)
    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    "path",
    [*DEPLOYMENTS.glob("overlays/*/deployment.yaml"), *DEPLOYMENTS.glob("components/*/deployment.yaml")],
    ids=lambda path: path.parent.name,
)
def test_a_patch_of_the_deployment_sets_options_of_the_server(path: Path) -> None:
    patch = yaml.safe_load(path.read_text())
    assert patch["metadata"]["name"] == DEPLOYMENT["metadata"]["name"]
    for container in patch["spec"]["template"]["spec"].get("containers", ()):
        assert container["name"] == SERVER["name"]
        patched = parse([], inherited_environment(path.parent) | environment(container), "tgis serve")
        assert not patched.warnings
        assert patched.max_batch_size is not None
        assert patched.max_concurrent_requests >= 2 * patched.max_batch_size  # a full batch may wait


@pytest.mark.parametrize(("name", "gpus"), [("cuda-n", "4"), ("bloom", "8"), ("flan-ul2-tp", "2")])
def test_each_rank_has_a_gpu(name: str, gpus: str) -> None:
    (container,) = load(f"overlays/{name}/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    assert environment(container)["NUM_SHARD"] == container["resources"]["limits"]["nvidia.com/gpu"] == gpus


def test_images_have_the_version_of_the_package() -> None:
    files = [path.read_text() for path in DEPLOYMENTS.rglob("*.yaml") if "checks" not in path.parts]
    images = [image for text in files for image in re.findall(r"^\s+(?:- )?image: (\S+)$", text, re.MULTILINE)]
    assert images == [f"tgis:{__version__}"] * 4


def test_kserve_finds_the_port_the_model_and_the_metrics() -> None:
    spec = load("kserve/serving-runtime.yaml")["spec"]
    (container,) = spec["containers"]
    assert container["ports"] == [{"name": "h2c", "containerPort": 8033, "protocol": "TCP"}]
    assert environment(container)["MODEL_NAME"] == "/mnt/models"
    assert environment(container)["SHUTDOWN_GRACE_SECONDS"] == environment(SERVER)["SHUTDOWN_GRACE_SECONDS"]
    assert container["lifecycle"] == SERVER["lifecycle"]
    predictor = load("kserve/inference-service.yaml")["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] == POD["terminationGracePeriodSeconds"]
    assert spec["annotations"] == {
        "opendatahub.io/kserve-runtime": "tgis",
        "prometheus.io/port": "3000",
        "prometheus.io/path": "/metrics",
    }


def test_every_expression_is_of_metrics_that_the_server_exports(exported: set[str]) -> None:
    """The expressions of alerts, dashboard, KEDA, the endpoint picker and OpenShift AI."""
    every = expressions.every_expression()
    assert len(every) > 50
    others = expressions.PROMETHEUS | expressions.KUBELET
    for expression in every:
        assert expression.metrics, expression
        assert expression.metrics <= exported | others, expression
        assert not expression.adds_replicas_of_other_bounds, expression
    assert not Expression("planted", "sum(tgi_queue_sizes)").metrics <= exported
    assert Expression("planted", "sum by (le) (rate(tgi_length_bucket[5m]))").adds_replicas_of_other_bounds


@pytest.fixture(scope="module")
def exported(server: Server) -> set[str]:
    lines = (full_scrape() + server.get("/metrics")[1]).splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_fake(tmp_path_factory.mktemp("server"), {}) as running:
        yield running


def test_alerts_wait_have_a_severity_are_tested_and_explained() -> None:
    (group,) = load("components/alerts/rules.yaml")["spec"]["groups"]
    tested = re.findall(r"^ +alertname: (\w+)$", (DEPLOYMENTS / "checks/alerts-test.yaml").read_text(), re.MULTILINE)
    assert sorted(tested) == sorted(rule["alert"] for rule in group["rules"])
    for rule in group["rules"]:
        assert re.fullmatch(r"\d+[mh]", rule["for"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert f"| `{rule['alert']}` |" in (ROOT / "docs" / "deploying.md").read_text()


def test_probes_get_answers_on_the_port_of_metrics(server: Server) -> None:
    for path in consistency.PROBE_PATHS:
        assert server.get(path)[0] == 200


def test_the_service_config_balances_checks_health_and_retries(server: Server) -> None:
    text = (DEPLOYMENTS / "grpc-service-config.json").read_text()
    refusals = iter([True, True])

    def generate(request: object, context: grpc.ServicerContext) -> pb.BatchedGenerationResponse:
        if next(refusals, False):
            context.abort(grpc.StatusCode.UNAVAILABLE, "full")
        return pb.BatchedGenerationResponse()

    service = pb_grpc.GenerationServiceServicer()
    service.Generate = generate  # type: ignore[method-assign]
    other = grpc.server(ThreadPoolExecutor(1))
    pb_grpc.add_GenerationServiceServicer_to_server(service, other)
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    for target in (server.target, f"127.0.0.1:{port}"):
        with grpc.insecure_channel(target, [("grpc.service_config", text)]) as channel:
            pb_grpc.GenerationServiceStub(channel).Generate(unary_request("text", 1), timeout=10)
    assert next(refusals, None) is None
    other.stop(None)


def test_no_kustomization_sets_images() -> None:
    """The base's would rename the server's image before a component adds its container."""
    assert not [
        path for path in DEPLOYMENTS.rglob("kustomization.yaml") if "images" in yaml.safe_load(path.read_text())
    ]


def test_the_environment_is_a_valid_configuration(config: Config) -> None:
    assert not config.warnings
    assert config.max_sequence_length == 2048
    assert config.max_batch_size is not None
    assert config.max_concurrent_requests >= 2 * config.max_batch_size  # a full batch may wait
    assert str(config.hub_cache).startswith("/shared_model_storage/")


def test_the_drain_fits_into_the_grace_of_the_pod(config: Config) -> None:
    (_, seconds) = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    exit_seconds = 10  # of the engine process and what is left in the front end
    assert int(seconds) + config.shutdown_grace_seconds + exit_seconds <= POD["terminationGracePeriodSeconds"] == 120


def test_the_service_finds_the_pods() -> None:
    service, labels = load("base/service.yaml"), DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["clusterIP"] == "None"  # clients balance over the pods


def test_the_pod_is_confined_and_can_write_only_to_tmp(config: Config) -> None:
    assert POD["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert SERVER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = [mount["mountPath"] for mount in SERVER["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["/tmp"]
    assert config.cache_dir.is_relative_to("/tmp")
    assert {volume["name"] for volume in POD["volumes"]} == {mount["name"] for mount in SERVER["volumeMounts"]}


def test_the_download_puts_the_served_model_where_the_server_finds_it(config: Config) -> None:
    assert load("components/download-weights/kustomization.yaml")["patches"] == [{"path": "deployment.yaml"}]
    patch = load("components/download-weights/deployment.yaml")
    assert patch["metadata"]["name"] == DEPLOYMENT["metadata"]["name"]
    changes = patch["spec"]["template"]["spec"]
    (init,), (served,) = changes["initContainers"], changes["containers"]
    environ = {entry["name"]: entry.get("value") for entry in init["env"]}
    assert served == {"name": SERVER["name"], "env": [{"name": "MODEL_NAME", "value": environ["MODEL_NAME"]}]}
    assert environ["HF_HUB_CACHE"] == str(config.hub_cache)
    assert init["command"] == ["tgis", "download-weights", "$(MODEL_NAME)"]
    assert init["command"][1] in COMMANDS
    for name in ("image", "securityContext", "terminationMessagePolicy"):
        assert init[name] == SERVER[name]
    assert init["volumeMounts"] == [
        {name: value for name, value in mount.items() if name != "readOnly"} for mount in SERVER["volumeMounts"]
    ]
    (volume,) = changes["volumes"]
    volume["persistentVolumeClaim"]["readOnly"] = True
    assert volume in POD["volumes"]
