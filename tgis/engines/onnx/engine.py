"""Engine `hf_optimum_ort`: graphs exported by Optimum, run by onnxruntime in the padded batches of hf_transformers.

The dtype is that of the graphs; soft prompts and LoRA adapters are not supported.
"""

import torch

from tgis.engines.base import warn
from tgis.engines.loading.loader import load_config
from tgis.engines.onnx.models import OnnxCausalLM, OnnxSeq2SeqLM
from tgis.engines.onnx.session import cuda_available
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.padded.model import PaddedModel
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions


def load_engine(options: EngineOptions) -> PaddedEngine:
    return PaddedEngine(options, _load_model, "hf_optimum_ort")


def _load_model(options: EngineOptions, device: torch.device, _max_batch_size: int) -> PaddedModel:
    if device.type == "cuda" and not cuda_available():
        raise StartError("the onnxruntime installed has no CUDA: install onnxruntime-gpu, or set CUDA_VISIBLE_DEVICES=")
    config = load_config(options)
    model = (OnnxSeq2SeqLM if config.is_encoder_decoder else OnnxCausalLM)(options, config, device)
    dtype = str(model.info.dtype).removeprefix("torch.")
    if options.dtype not in (None, dtype):
        warn(options, f"DTYPE={options.dtype} has no effect: the graphs were exported in {dtype}")
    return model
