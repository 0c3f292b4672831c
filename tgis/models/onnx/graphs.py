"""Quantizes and optimizes ONNX graphs with onnxruntime; writes them to another directory under the same names."""

import logging
from pathlib import Path

import onnx
import onnxruntime
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

EXTERNAL_DATA_BYTES = 1 << 30  # larger graphs store weights in a separate file: protobuf is limited to 2 GiB
BLOCK_SIZE = 32  # weights that share a scale; larger blocks change twice as many tokens of SmolLM2
ACCURACY_LEVEL = 4  # onnxruntime's code for int8 activations, quantized per token


def quantize(file: Path, folder: Path) -> None:
    """Quantize the weights of matrix products to int8 in blocks.

    onnxruntime's dynamic quantization has one scale per batch, so requests would influence each other; it was no faster
    than float32 either, and changed every third token.
    """
    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
    quantizer = MatMulNBitsQuantizer(
        onnx.load(file), bits=8, block_size=BLOCK_SIZE, is_symmetric=True, accuracy_level=ACCURACY_LEVEL
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(folder / file.name), _model_bytes(file) > EXTERNAL_DATA_BYTES)


def optimize(file: Path, folder: Path) -> None:
    """Do once what onnxruntime does whenever it loads a graph: fold constants and fuse operators for the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / file.name)
    if _model_bytes(file) > EXTERNAL_DATA_BYTES:
        key = "session.optimized_model_external_initializers_file_name"
        options.add_session_config_entry(key, f"{file.name}_data")
    onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _model_bytes(file: Path) -> int:
    """Size of a graph and its external data."""
    return sum(part.stat().st_size for part in file.parent.glob(f"{file.name}*"))
