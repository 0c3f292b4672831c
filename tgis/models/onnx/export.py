"""Exports a model to ONNX in a new directory that can be served: by Optimum, in a child process with an older
transformers, then optionally quantized and optimized by onnxruntime.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgis.errors import StartError
from tgis.models.files import ModelFiles, find_weights, is_encoder_decoder
from tgis.models.hub import CONFIG_EXTENSIONS
from tgis.models.onnx.optimum_packages import ensure_packages
from tgis.models.staging import run_child, staging_directory, timed

SCRIPT = Path(__file__).with_name("optimum_export.py")
EXPORT_SECONDS = 3 * 3600
UNMERGED_DECODERS = ("decoder_model.onnx", "decoder_with_past_model.onnx")


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """Options of an export."""

    optimize: bool = False
    quantize: bool = False  # to int8
    python: Path | None = None  # an interpreter with Optimum; None: Optimum is installed into the cache directory


def convert_to_onnx(model: ModelFiles, out: Path, options: OnnxOptions, cache_dir: Path) -> None:
    """Write the graphs and all else that serving needs to directory `out`, which appears when it is complete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StartError(f"{out} is there already")
    if missing := [name for name in ("onnx", "onnx_ir", "onnxruntime") if importlib.util.find_spec(name) is None]:
        raise StartError(f"convert-to-onnx needs {' and '.join(missing)}: pip install 'tgis[onnx]'")
    find_weights(model.path)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with staging_directory(out.parent, f".{out.name}-") as staging:
            _export(model, staging, options, cache_dir)
            graphs = _postprocess(staging / "graphs", options)
            _copy_config_files(model.path, graphs)
            graphs.rename(out)
    except OSError as error:
        raise StartError(f"cannot write {out}: {error.strerror}") from error


def _export(model: ModelFiles, staging: Path, options: OnnxOptions, cache_dir: Path) -> None:
    packages = [] if options.python else [str(ensure_packages(cache_dir))]
    source = staging / "source"
    _make_export_source(model, source)
    command = [str(options.python or sys.executable), str(SCRIPT), str(source), str(staging / "graphs"), *packages]
    with timed("export with Optimum"):
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


def _postprocess(graphs: Path, options: OnnxOptions) -> Path:
    """Quantize and optimize as requested; returns the directory of the final graphs."""
    if options.quantize or options.optimize:
        from tgis.models.onnx import graphs as onnx_graphs  # noqa: PLC0415 - onnxruntime, for those who want it

        if options.quantize:
            graphs = _convert_each(graphs, "quantize", onnx_graphs.quantize)
        if options.optimize:
            graphs = _convert_each(graphs, "optimize", onnx_graphs.optimize)
    return graphs


def _convert_each(graphs: Path, name: str, change: Callable[[Path, Path], None]) -> Path:
    folder = graphs.with_name(name)
    folder.mkdir()
    for file in sorted(graphs.glob("*.onnx")):
        with timed(f"{name} {file.name}"):
            change(file, folder)
    return folder


def _copy_config_files(source: Path, graphs: Path) -> None:
    """Copy config and tokenizer of the model: Optimum's are those of the older transformers."""
    for file in graphs.iterdir():
        if ".onnx" not in file.name:
            file.unlink()
    for file in source.iterdir():
        index = file.name.endswith(".index.json")
        if file.is_file() and file.name.endswith((*CONFIG_EXTENSIONS, ".jinja")) and not index:
            shutil.copyfile(file, graphs / file.name)
