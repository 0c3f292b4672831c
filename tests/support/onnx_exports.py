"""ONNX graphs of the demo models, exported once and kept in the test cache under a key of what they depend on."""

import hashlib
from pathlib import Path

import onnx
from compute_once import compute_once
from onnx import TensorProto, helper

from tgis.models.onnx import export, optimum_export

MAKERS = [Path(str(module.__file__)) for module in (export, optimum_export)]


def exported(model: Path, cache: Path, *options: str) -> Path:
    """A demo model converted by `tgis convert-to-onnx`."""
    digest = hashlib.sha256()
    for file in (*MAKERS, export.REQUIREMENTS):
        digest.update(file.read_bytes())
    out = cache / "onnx" / "-".join([model.name, *(option.strip("-") for option in options), digest.hexdigest()[:12]])
    environment = {"CACHE_DIR": str(cache)}
    return compute_once(out, "-m", "tgis", "convert-to-onnx", *options, model, environment=environment)


def beside(source: Path, folder: Path) -> Path:
    """A directory with links to all files of another except its graphs."""
    folder.mkdir()
    for file in source.iterdir():
        if ".onnx" not in file.name:
            (folder / file.name).symlink_to(file)
    return folder


def halves(source: Path, folder: Path) -> Path:
    """A decoder-only model in the old layout: one graph without a KV cache input, one with it."""
    beside(source, folder)
    (folder / "decoder_with_past_model.onnx").symlink_to(source / "model.onnx")
    onnx.save(without_past(onnx.load(source / "model.onnx")), folder / "decoder_model.onnx")
    return folder


def without_past(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with an empty KV cache built in."""
    graph = model.graph
    past = [port for port in graph.input if port.name.startswith("past_key_values.")]
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["rows"], start=0, end=1),
        *(node for port in past for node in _nothing(port)),
    ]
    for port in past:
        graph.input.remove(port)
    for index, node in enumerate(nodes):
        graph.node.insert(index, node)
    return model


def _nothing(port: onnx.ValueInfoProto) -> list[onnx.NodeProto]:
    _, heads, _, size = (axis.dim_value for axis in port.type.tensor_type.shape.dim)
    rest, shape = f"{port.name} rest", f"{port.name} shape"
    tensor = helper.make_tensor("", TensorProto.INT64, [3], [heads, 0, size])
    return [
        helper.make_node("Constant", [], [rest], value=tensor),
        helper.make_node("Concat", ["rows", rest], [shape], axis=0),
        helper.make_node("ConstantOfShape", [shape], [port.name]),
    ]
