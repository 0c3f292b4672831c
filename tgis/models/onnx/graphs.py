"""Files of ONNX made smaller or faster by onnxruntime; the results keep their names, in another folder."""

import logging
from pathlib import Path

import onnx
import onnxruntime
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

EXTERNAL_DATA_BYTES = 1 << 30  # weights of larger graphs get a file of their own: protobuf ends at 2 GiB
BLOCK_SIZE = 32  # weights of a column that share a scale: with more of them SmolLM2 chooses other tokens twice as often
ACCURACY_LEVEL = 4  # onnxruntime's `accuracy_level`: activations become int8 too, each token by itself


def quantize(file: Path, folder: Path) -> None:
    """Weights of matrix products to int8, in blocks.

    onnxruntime's dynamic quantization has one scale for a whole pass, so that rows would disturb each other; it was
    no faster than float32 either, and chose every third token otherwise.
    """
    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
    quantizer = MatMulNBitsQuantizer(
        onnx.load(file), bits=8, block_size=BLOCK_SIZE, is_symmetric=True, accuracy_level=ACCURACY_LEVEL
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(folder / file.name), _model_bytes(file) > EXTERNAL_DATA_BYTES)


def optimize(file: Path, folder: Path) -> None:
    """What onnxruntime does whenever it loads a graph, done once: constants folded, operators fused for the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / file.name)
    if _model_bytes(file) > EXTERNAL_DATA_BYTES:
        key = "session.optimized_model_external_initializers_file_name"
        options.add_session_config_entry(key, f"{file.name}_data")
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _model_bytes(file: Path) -> int:
    """Of a graph and what lies beside it for it."""
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))
