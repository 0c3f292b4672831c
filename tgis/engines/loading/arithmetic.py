"""What decides the numbers beside the files of the model: for the fingerprint, and for whether it is a promise."""

import msgspec
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tgis.engines.kernels.cpu.experts import PackedExperts
from tgis.engines.kernels.cpu.gemm import CpuGemm
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.kernels.cpu.linear import PackedLinear
from tgis.engines.kernels.cpu.quantized import QuantizedGemm
from tgis.engines.loading.loader import has_other_state
from tgis.ipc.messages import EngineInfo, EngineOptions

# One more whenever a change of the code changes logits or draws: tests/engines/paged/test_fingerprint.py notices.
ARITHMETIC_VERSION = 1


def is_invariant(model: PreTrainedModel, kernels: CpuKernels | None) -> bool:
    """Whether the bits of a row do not depend on the batch, as far as layers other than attention decide."""
    if kernels is None or model.dtype not in DTYPES:
        return False
    return not any(map(_multiplies_in_torch, model.modules()))


def _multiplies_in_torch(module: nn.Module) -> bool:
    """Whether PyTorch or oneDNN multiplies by a weight of this module, or by several that are stacked in it."""
    if isinstance(module, PackedLinear):
        return not isinstance(module.gemm, CpuGemm | QuantizedGemm)
    is_stacked = any(weight.ndim > 2 for weight in module.parameters(recurse=False))
    return isinstance(module, nn.Linear | Conv1D) or (is_stacked and not isinstance(module, nn.Conv1d))


def with_arithmetic(
    info: EngineInfo, options: EngineOptions, model: PreTrainedModel | None = None, kernels: CpuKernels | None = None
) -> EngineInfo:
    """The description of an engine, completed. There is a `model`, with the kernels that compute it, if the bits of a
    row do not depend on the batch.
    """
    parts = [ARITHMETIC_VERSION, info.engine, info.dtype, info.kv_cache_dtype, options.num_shards]
    parts += [torch.__version__, transformers.__version__, _instructions(info, options, model, kernels)]
    if info.quantize != "none":
        parts += [info.quantize, options.quantize_logits, options.quantize_activations]
    if info.kv_cache_dtype == "int8" or getattr(model, "fixed_frequencies", False):  # computed for this length
        parts.append(options.max_sequence_length)
    return msgspec.structs.replace(info, arithmetic=" ".join(map(str, parts)), invariant=model is not None)


def _instructions(
    info: EngineInfo, options: EngineOptions, model: PreTrainedModel | None, kernels: CpuKernels | None
) -> str:
    """The instruction set, as far as bits differ by it."""
    if not (model and kernels):
        cpu = f"{options.cpu_isa} {torch.backends.cpu.get_cpu_capability()}"
        return cpu if info.device == "cpu" else str(torch.cuda.get_device_name())
    has_experts = any(isinstance(module, PackedExperts) for module in model.modules())
    has_one_order = info.dtype == "float32" and not (has_experts or has_other_state(model))
    return "fma" if has_one_order and kernels.isa.startswith(("avx", "amx")) else kernels.isa
