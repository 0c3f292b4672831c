"""What users install serves a model: the wheel (`make test-wheel`) and the image (`make test-image`)."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Server, running_command, unary_request
from repository import REPOSITORY

from tgis import __version__

TESTED = os.environ.get("INSTALL_TESTS")
BUILDER = os.environ.get("BUILDER", "podman").split()
BASE, IMAGE = "localhost/debian-with-python", "localhost/tgis:test"
pytestmark = pytest.mark.timeout(7200)
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


def check(server: Server) -> None:
    """It answers, and runs kernels that were compiled before the start."""
    with server.stub() as stub:
        (response,) = stub.Generate(unary_request("The capital of France is", 4), timeout=120).responses
    assert response.text.startswith(" Paris")
    assert "/site-packages/tgis/engines/kernels/" in server.log.read_text().replace("dist-packages", "site-packages")
    assert server.stop() == 0


@pytest.mark.skipif(TESTED != "wheel", reason="make test-wheel")
def test_the_wheel_serves_without_a_compiler(smollm2_dir: Path, tmp_path: Path) -> None:
    programs = tmp_path / "env/bin"
    subprocess.run([sys.executable, "-m", "venv", programs.parent], check=True)
    (wheel,) = (REPOSITORY / "dist").glob(f"tgis-{__version__}-*.whl")
    assert shutil.which("cc", path=programs) is None
    alone: dict[str, Any] = {"PATH": str(programs), "PYTHONPATH": "", "CACHE_DIR": str(tmp_path / "cache")}
    install = f"{programs}/pip install --constraint {REPOSITORY}/constraints.txt {wheel}"
    subprocess.run(install.split(), env=os.environ | alone, check=True)
    with running_command([str(programs / "tgis"), "serve", str(smollm2_dir)], tmp_path, **alone) as server:
        check(server)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """An image of a Debian with Python, pip and the certificates of this machine."""
    if subprocess.run([*BUILDER, "image", "exists", BASE], check=False).returncode:
        root, packages = tmp_path / "root", "python3-pip,python-is-python3,ca-certificates"
        mirror = subprocess.check_output(["apt-get", "indextargets", "--format", "$(REPO_URI)"], text=True).split()[0]
        make_root = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root), mirror]
        subprocess.run(make_root, check=True)
        shutil.copy(f"/{CERTIFICATES}", root / CERTIFICATES)
        subprocess.run(["tar", "-C", root, "-cf", tmp_path / "root.tar", "."], check=True)
        subprocess.run([*BUILDER, "import", tmp_path / "root.tar", BASE], check=True)
    return BASE


@pytest.fixture
def image(base: str) -> Iterator[str]:
    """The image for CPUs; `chroot` builds it where a container may not be nested."""
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    options = "--isolation chroot"
    if wheels:
        options += f" --volume {wheels}:{wheels}:ro --build-arg PIP_FIND_LINKS={wheels}"
    make = ["make", "image", f"BASE={base}", "VARIANT=cpu", f"IMAGE={IMAGE}", f"BUILDER={' '.join(BUILDER)}"]
    subprocess.run([*make, f"ARGS={options}"], cwd=REPOSITORY, check=True)
    subprocess.run([*BUILDER, "images", IMAGE], check=True)
    yield IMAGE
    subprocess.run([*BUILDER, "rm", "--force", "--ignore", "tgis-test"], check=True)


@pytest.mark.skipif(TESTED != "image", reason="make test-image")
def test_the_image_serves_as_any_user_with_a_read_only_root(image: str, smollm2_dir: Path, tmp_path: Path) -> None:
    options = "--name tgis-test --network host --read-only --tmpfs /tmp --user 12345:0 --ulimit nofile=4096:4096"
    variables = [f"--env={name}" for name in ("GRPC_PORT", "PORT", "BIND_ADDRESS", "MODEL_NAME", "NUM_THREADS")]
    command = [*BUILDER, "run", *options.split(), "--ulimit=nproc=4096:4096", *variables]
    command.append(f"--volume={smollm2_dir.resolve()}:/model:ro")
    with running_command([*command, image], tmp_path, MODEL_NAME="/model") as server:
        check(server)
