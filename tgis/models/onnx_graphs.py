"""Files of ONNX made smaller or faster by onnxruntime; the results keep their names, in another folder."""

import logging
from pathlib import Path

import onnxruntime
from onnxruntime.quantization import QuantType, quantize_dynamic

SEPARATE_BYTES = 1 << 30  # weights of larger graphs get a file of their own: protobuf ends at 2 GiB


def quantize(file: Path, folder: Path) -> None:
    """Weights of matrix products to int8, one scale per column; activations are scaled pass by pass."""
    logging.getLogger().setLevel(logging.ERROR)  # it warns of its own habits
    quantize_dynamic(
        file,
        folder / file.name,
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=_bytes(file) > SEPARATE_BYTES,
        extra_options={"EnableSubgraph": True, "MatMulConstBOnly": True},
    )


def optimize(file: Path, folder: Path) -> None:
    """What onnxruntime does whenever it loads a graph, done once: constants folded, operators fused for the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / file.name)
    if _bytes(file) > SEPARATE_BYTES:
        key = "session.optimized_model_external_initializers_file_name"
        options.add_session_config_entry(key, f"{file.name}_data")
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _bytes(file: Path) -> int:
    """Of a graph and what lies beside it for it."""
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))
