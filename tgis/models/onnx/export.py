"""Exports a model to ONNX in a new directory that can be served: by Optimum, in a child process with an older
transformers.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from tgis.errors import StartError, file_errors
from tgis.models.files import ModelFiles, find_weights, is_encoder_decoder
from tgis.models.staging import made_once, new_model, num_bytes, replace_config_files, run_child, timed
from tgis.utils.progress import watched

SCRIPT = Path(__file__).with_name("optimum_export.py")
REQUIREMENTS = Path(__file__).with_name("optimum.txt")
INSTALL_SECONDS = 1800
EXPORT_SECONDS = 3 * 3600
UNMERGED_DECODERS = ("decoder_model.onnx", "decoder_with_past_model.onnx")


def convert_to_onnx(model: ModelFiles, out: Path, cache_dir: Path, python: Path | None) -> None:
    """Write the graphs and all else that serving needs to directory `out`, which appears when it is complete.

    `python` is an interpreter with Optimum; None: Optimum is installed into `cache_dir`.
    """
    with new_model(out, "convert-to-onnx", "onnx", ("onnx", "onnxruntime")) as staging:
        find_weights(model.path)
        _export(model, staging, python, cache_dir)
        graphs = staging / "graphs"
        replace_config_files(model.path, graphs, ("*.onnx*",))  # those of Optimum are of the older transformers
        graphs.rename(out)


def _export(model: ModelFiles, staging: Path, python: Path | None, cache_dir: Path) -> None:
    packages = [] if python else [str(_ensure_packages(cache_dir))]
    source = staging / "source"
    _make_export_source(model, source)
    command = [str(python or sys.executable), str(SCRIPT), str(source), str(staging / "graphs"), *packages]
    with timed("export with Optimum"), watched("exporting", lambda: num_bytes(staging), None, "B"):
        reason = run_child(command, EXPORT_SECONDS)
    if reason is not None:
        raise StartError(f"Optimum cannot export {model.path}: {reason}")
    if is_encoder_decoder(model.config):  # the merged graph replaces its two parts
        for half in UNMERGED_DECODERS:
            (staging / "graphs" / half).unlink()


def _make_export_source(model: ModelFiles, folder: Path) -> None:
    """A directory with links to the model's files and a config.json for transformers 4."""
    folder.mkdir()
    for file in model.path.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(_to_transformers_4(model.config)))


def _to_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The config with `rope_parameters` under their former names: transformers 4 would silently ignore them."""
    converted = {key: _to_transformers_4(value) if isinstance(value, dict) else value for key, value in config.items()}
    rope = converted.pop("rope_parameters", None)
    if rope is None:
        return converted
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise StartError("config.json: rope_parameters that differ between layers cannot be exported")
    scaling = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in scaling:
            converted[name] = scaling.pop(name)
    return converted | {"rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling}


def _ensure_packages(cache_dir: Path) -> Path:
    """A directory with Optimum and an older transformers, made once, which only the child process has on its path.

    pip reads its own variables, such as PIP_FIND_LINKS. StartError if it fails.
    """
    key = hashlib.sha256(f"{sys.version_info[:2]} {REQUIREMENTS.read_text()}".encode()).hexdigest()[:12]
    target = cache_dir / f"optimum-{key}"
    with file_errors(f"cannot make {target}"):
        return made_once(target, _install)


def _install(target: Path) -> None:
    print(f"installing Optimum into {target.parent}, apart from the packages of tgis ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--requirement", str(REQUIREMENTS), "--target", str(target)]
    with watched("installing", lambda: num_bytes(target), None, "B"):
        reason = run_child(command, INSTALL_SECONDS)
    if reason:
        raise StartError(f"cannot install Optimum (PIP_FIND_LINKS and --python need no network): {reason}")
