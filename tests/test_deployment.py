"""What ships beside the code: manifests, Containerfile, packaging, pinned versions, make targets."""

import configparser
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import containerfile
import pytest
import yaml
from packaging.requirements import Requirement

from tgis.__main__ import COMMANDS
from tgis.config import Config, parse
from tgis.utils.options import declared_options

ROOT = Path(__file__).parents[1]
NAMES = {name.upper() for row in declared_options(Config) for name in row.names}


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "deployment" / name).read_text())
    return loaded


DEPLOYMENT = load("deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]
RECIPE = (ROOT / "Containerfile").read_text()
IMAGE = containerfile.describe(RECIPE, Path("/"))


@pytest.fixture(scope="module")
def config() -> Config:
    environ = {entry["name"]: entry["value"] for entry in SERVER["env"]}
    assert all(isinstance(value, str) for value in environ.values())  # Kubernetes accepts only strings
    assert set(environ) <= NAMES
    return parse([], environ, "tgis serve")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_an_overlay_sets_the_image_of_both_containers(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deployment", tmp_path / "deployment")
    (tmp_path / "overlay").mkdir()
    overlay = {
        "resources": ["../deployment"],
        "components": ["../deployment/download-weights"],
        "images": [{"name": "tgis", "newName": "registry.example/tgis", "newTag": "1.0"}],
    }
    (tmp_path / "overlay" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    rendered = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "overlay"], check=True, capture_output=True, text=True
    ).stdout
    (pod,) = [each["spec"]["template"]["spec"] for each in yaml.safe_load_all(rendered) if each["kind"] == "Deployment"]
    images = {container["name"]: container["image"] for container in (*pod["initContainers"], *pod["containers"])}
    assert images == dict.fromkeys(("download-weights", "server"), "registry.example/tgis:1.0")


def test_no_kustomization_below_an_overlay_sets_images() -> None:
    """The base's would rename the server's image before the component adds its container."""
    assert not [name for name in ("", "download-weights/") if "images" in load(f"{name}kustomization.yaml")]


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


def test_the_ports_are_those_of_the_server(config: Config) -> None:
    assert {port["name"]: port["containerPort"] for port in SERVER["ports"]} == {
        "http": config.port,
        "grpc": config.grpc_port,
    }


def test_the_service_exposes_grpc() -> None:
    service = load("service.yaml")
    (port,) = service["spec"]["ports"]
    assert port == {"name": "grpc", "port": 8033, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"}
    assert service["spec"]["clusterIP"] == "None"
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["metadata"]["name"] == DEPLOYMENT["metadata"]["name"] == "inference-server"


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
    assert load("download-weights/kustomization.yaml")["patches"] == [{"path": "deployment.yaml"}]
    patch = load("download-weights/deployment.yaml")
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


def test_the_image_starts_the_server_as_its_first_process() -> None:
    assert IMAGE.command == ["tgis", "serve"]
    assert IMAGE.user == "2000:0"  # runAsNonRoot can only be checked for a numeric id


def test_the_environment_of_the_image_is_a_valid_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(IMAGE.environment) - NAMES == {"HOME", "LANG", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}
    monkeypatch.setattr(os, "environ", IMAGE.environment)
    config = parse([], {"MODEL_NAME": "m", **IMAGE.environment}, "tgis serve")
    assert IMAGE.ports == [config.port, config.grpc_port]
    assert config.cache_dir.is_relative_to("/tmp")
    assert config.hf_home.is_relative_to("/tmp")


def test_the_build_context_is_what_the_image_copies() -> None:
    copied = {
        source.rstrip("/")
        for instruction, argument in containerfile.steps(RECIPE)
        if instruction == "COPY" and not argument.startswith("--from=")
        for source in argument.split()[:-1]
    }
    lines = (ROOT / ".containerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert {source.split("/")[0] for source in copied} == allowed


@pytest.mark.parametrize(("extras", "installed"), [("", "."), ("onnx", ".[onnx]")])
def test_the_image_installs_an_extra_on_demand(extras: str, installed: str) -> None:
    (argument,) = re.findall(r"^RUN pip install .* (\S+EXTRAS\S+)$", RECIPE, re.MULTILINE)
    shown = subprocess.check_output(["sh", "-c", f"echo {argument}"], env={"EXTRAS": extras}, text=True)
    assert shown == f"{installed}\n"
    assert not extras or extras in setup_cfg()["options.extras_require"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_image_builds_and_works_for_any_user() -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        root.chmod(0o755)
        image = containerfile.replay(RECIPE, ROOT, root)
        user = containerfile.unprivileged_uid()
        assert image.run(["tgis", "--help"], user).startswith("usage: tgis")
        for script in ("text-generation-launcher", "text-generation-server", "model-util", "grpc_healthcheck"):
            assert image.run([script, "--help"], user).startswith(f"usage: {script} ")
        module = ["python", "-m", "vllm_tgis_adapter"]
        assert image.run([*module, "--help"], user).startswith(f"usage: {' '.join(module)} ")
        where = image.run(
            ["python", "-c", "import tgis.server, tgis.engine_core.main; print(tgis.server.__file__)"], user
        )
        assert where.startswith(str(root / "venv"))
        load = "from tgis.engines.kernels.cpu.library import load_kernels; print(load_kernels('generic', '').isa)"
        assert image.run(["python", "-c", load], user) == "generic\n"  # prebuilt: there is no CACHE_DIR to compile in


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements() -> list[Requirement]:
    parser = setup_cfg()
    texts = [parser["options"]["install_requires"], *parser["options.extras_require"].values()]
    return [Requirement(line) for text in texts for line in text.splitlines() if line.strip()]


def test_constraints_are_exact_and_within_the_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    named = {_normal(name): version for name, version in pins.items()}
    assert len(named) == len(pins)
    for requirement in requirements():
        assert named[_normal(requirement.name)] in requirement.specifier, requirement


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_setuptools_finds_every_package() -> None:
    folders = {path.parent for path in (ROOT / "tgis").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_package_has_the_module_of_vllm_tgis_adapter(tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tgis", "vllm_tgis_adapter"]
    usage = [sys.executable, "-P", "-m", "vllm_tgis_adapter", "--help"]
    shown = subprocess.check_output(usage, env=os.environ | {"PYTHONPATH": str(tmp_path)}, text=True)
    assert shown.startswith("usage: python -m vllm_tgis_adapter --model-name TEXT [options]")
    assert "[env: PORT] [default: 8000]" in " ".join(shown.split())


def test_the_console_scripts_exist() -> None:
    for script in setup_cfg()["options.entry_points"]["console_scripts"].strip().split("\n"):
        module, _, function = script.partition(" = ")[2].partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_make_lists_every_target() -> None:
    declared = re.findall(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    listed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [line.split()[0] for line in listed] == declared
    assert all(len(line.split(maxsplit=1)[1]) > 10 for line in listed)


def test_ci_runs_the_make_targets() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert re.findall(r"^make (\S+)", script, re.MULTILINE) == ["check", "test"]
