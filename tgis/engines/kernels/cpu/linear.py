"""Linear layers on the CPU: weights are packed once, for the GEMM that multiplies by them on this machine."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tgis.engines.host_memory import HugePages
from tgis.engines.kernels.cpu.gemm import CpuGemm, Gemm, MakeGemm, OneDnnGemm, is_right, our_gemms, smallest
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.kernels.cpu.quantized import (
    PlainGemm,
    QuantizedGemm,
    describe_kind,
    has_kernel,
    is_quantized_right,
    isa_of,
    sample_of,
    stored,
)
from tgis.engines.quantization.config import Quantization
from tgis.engines.quantization.weight import QuantizedWeight, quantize
from tgis.utils.memory import trim_heap

log = logging.getLogger(__name__)

# The routers of mixtures of experts, and the time steps of Mamba, which are exponents.
_NEVER_QUANTIZED = frozenset({"gate", "router", "shared_expert_gate", "dt_proj"})


class GemmSelector:
    """The GEMM for each weight: ours if it is right on this CPU, that for AMX before the others, else oneDNN's.
    Quantizes what is to be quantized.
    """

    def __init__(self, kernels: CpuKernels | None, quantization: Quantization | None = None) -> None:
        self._kernels = kernels
        self._quantization = quantization
        self._memory = HugePages()
        self._right: dict[Hashable, bool] = {}
        self.counts: Counter[str] = Counter()  # weights, by what multiplies by them

    def gemm(self, weight: Tensor, dtype: torch.dtype) -> Gemm | None:
        """Of a weight [out, in] and activations of a dtype; None where nothing beats plain PyTorch. In 16 bits if they
        hold the weight.
        """
        for convert in (smallest, Tensor.to):
            packed = convert(weight, dtype)
            ours = our_gemms(packed, self._kernels, dtype)
            for name, make in reversed(ours.items()):
                if self._is_right(name, make, packed.dtype, dtype):
                    self.counts[name if packed.dtype == dtype else f"{name} with weights in {packed.dtype}"] += 1
                    return make(packed, memory=self._memory)
        if OneDnnGemm.supports(weight := weight.to(dtype)):
            self.counts["onednn"] += 1
            return OneDnnGemm(weight)
        return None

    def quantized_gemm(self, weight: QuantizedWeight, dtype: torch.dtype) -> Gemm:
        """The GEMM for a quantized weight and activations of a dtype. Scales are in 16 bits likewise."""
        kind, kernels = describe_kind(weight), self._kernels
        if kernels is not None and dtype in DTYPES and has_kernel(weight):
            ours = stored(weight)
            sample = sample_of(ours)
            how = sample.activations, sample.scale.dtype, sample.offset is None, sample.order is None
            key = id(weight.table), sample.group_size, how, dtype
            if self._checked(key, f"with {kind} in {dtype}", lambda: is_quantized_right(sample, kernels, dtype)):
                self.counts[f"{kind} by {isa_of(ours, kernels)}"] += 1
                return QuantizedGemm(ours, kernels, dtype, self._memory)
        self.counts[f"{kind} by PyTorch"] += 1
        return PlainGemm(weight)

    def expert_gemm(self, weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> CpuGemm | QuantizedGemm:
        """The GEMM for a linear layer of all experts as one weight [experts * out, in], and for activations of `dtype`
        if layers are not quantized. ValueError without a kernel.
        """
        how = self._quantization
        dtype = how.dtype if how else dtype
        if isinstance(weight, QuantizedWeight):
            weight = replace(weight, activations=how.activations_of(weight) if how else None)
        elif how and how.bits:
            weight = quantize(weight, how.bits, how.activations_of())
        gemm = self.gemm(weight, dtype) if isinstance(weight, Tensor) else self.quantized_gemm(weight, dtype)
        trim_heap(collect=False)  # else the C library keeps several times the result
        if not isinstance(gemm, (CpuGemm, QuantizedGemm)):
            raise ValueError(f"no kernel for experts in {dtype}")
        return gemm

    def pack(self, linear: nn.Linear, path: str, *, is_head: bool = False) -> "PackedLinear | None":
        """The layer with the packed weight."""
        weight, how = linear.weight.detach(), self._quantization
        dtype = how.dtype if how else weight.dtype
        codes = quantized_weight(linear, path, how, is_head=is_head) if how else None
        if codes is None:
            gemm = self.gemm(weight, dtype)
        else:
            gemm = self.quantized_gemm(codes, dtype)
            trim_heap(collect=False)  # else the C library keeps several times the result
        return None if gemm is None else PackedLinear(linear, gemm, dtype)

    def _is_right(self, name: str, make: MakeGemm, weight: torch.dtype, dtype: torch.dtype) -> bool:
        sample = torch.randn(70, 96, generator=torch.Generator().manual_seed(0)).to(weight)
        which = f"by {name} in {dtype}" if weight == dtype else f"by {name} in {dtype} with weights in {weight}"
        return self._checked((name, weight, dtype), which, lambda: is_right(make(sample), sample, dtype))

    def _checked(self, key: Hashable, which: str, is_right: Callable[[], bool]) -> bool:
        """Whether a kernel is right on this CPU, which is checked once."""
        if key not in self._right:
            self._right[key] = is_right()
            if not self._right[key]:
                log.warning("CPU kernels: linear layers %s are wrong on this CPU, and off", which)
        return self._right[key]


def quantized_weight(linear: nn.Linear, path: str, how: Quantization, *, is_head: bool) -> QuantizedWeight | None:
    """The weight of a layer in codes; None where it stays plain."""
    if hasattr(linear, "quantized"):
        weight: QuantizedWeight = linear.quantized.checked()
        return replace(weight, activations=how.activations_of(weight))
    bits = 8 if is_head and how.logits else None if is_head else how.bits
    if bits is None or not _NEVER_QUANTIZED.isdisjoint(path.split(".")):
        return None
    return quantize(linear.weight.detach(), bits, how.activations_of())


class PackedLinear(nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` with a packed copy of its weight."""

    def __init__(self, linear: nn.Linear, gemm: Gemm, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = linear.weight.detach().to("meta", dtype)  # some models ask for its dtype
        self.rounds_inputs: bool = getattr(gemm, "rounds_inputs", False)
        self.runs_cpu_kernel: bool = getattr(gemm, "runs_cpu_kernel", True)
        self.gemm = gemm

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return self.gemm(x, self.bias)


class WeightArgument:
    """A packed weight that models multiply by without calling its layer: a router's in F.linear, whose result is in
    float32, and that of Mamba's dt_proj from the left.
    """

    dtype = torch.float32

    def __init__(self, gemm: Gemm | None) -> None:
        """None where multiplying shall fail."""
        self._gemm: Any = gemm

    def float(self) -> "WeightArgument":
        return self

    def type(self, _: torch.dtype) -> "WeightArgument":
        return self

    def __matmul__(self, x: Tensor) -> Tensor:  # [1, in, T] -> [1, out, T]
        return self._gemm(x.mT.contiguous(), None).mT

    @classmethod
    def __torch_function__(cls, function: Any, _: object, args: Any = (), kwargs: Any = None) -> Any:
        if function is not functional.linear:
            return NotImplemented

        def logits(x: Tensor, weight: "WeightArgument", bias: Tensor | None = None) -> Tensor:
            return weight._gemm(x.float(), None if bias is None else bias.float())

        return logits(*args, **kwargs or {})


def pack_linears(model: PreTrainedModel, gemms: GemmSelector) -> None:
    """Replace the plain linear layers of a CPU model in place.

    A weight that is also an embedding stays where the embedding needs it.
    """
    head = model.get_output_embeddings()
    linears = [
        (f"{path}.{name}".lstrip("."), parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, Conv1D) and _is_packable(child)
    ]
    while linears:  # frees each layer as soon as it is packed
        path, parent, name, child = linears.pop()
        is_head = child is head
        child = _transposed(child) if isinstance(child, Conv1D) else child
        packed = gemms.pack(child, path, is_head=is_head)
        if packed is not None:
            setattr(parent, name, packed)


def _transposed(conv: Conv1D) -> nn.Linear:
    """What GPT-2 has in place of a linear layer, as one."""
    linear = nn.Linear(*conv.weight.shape, device="meta")
    linear.weight, linear.bias = nn.Parameter(conv.weight.T.contiguous(), requires_grad=False), conv.bias
    return linear


def _is_packable(linear: nn.Linear) -> bool:
    """Whether a layer can be replaced: not if its forward is wrapped."""
    weight, is_wrapped = linear.weight, "forward" in vars(linear)
    same_dtype = linear.bias is None or linear.bias.dtype == weight.dtype
    return same_dtype and weight.device.type == "cpu" and not is_wrapped
