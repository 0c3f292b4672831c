"""Mixtures of experts on the CPU, by experts.c: each linear layer of all experts together is one packed weight.

Modules of transformers' ExpertsInterface are replaced, as far as they compute the formula of experts.c. Others, and
classes that do not use this interface, run as transformers has them.
"""

import copy
import ctypes
import logging
import math
from collections import Counter
from dataclasses import dataclass
from inspect import signature
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel
from transformers.integrations.moe import batched_mm_experts_forward

from tgis.engines.kernels.agreement import agrees
from tgis.engines.kernels.cpu.activations import ACTIVATIONS
from tgis.engines.kernels.cpu.gemm import TILE_N, Gemm
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.kernels.cpu.linear import GemmSelector
from tgis.engines.kernels.cpu.probes import inputs_of_all_sizes, output_of, rows_close
from tgis.engines.quantization.weight import GROUP, QuantizedWeight

log = logging.getLogger(__name__)

_ALIGNMENT = 8  # rows of an expert begin at a multiple, as in experts.h
_BLOCK_WORDS = 5  # int64 in an expert_block


class _Layer(ctypes.Structure):
    """`expert_layer` of experts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("multiply", "quantize", "weight", "bias")),
        *((name, ctypes.c_int64) for name in ("stride", "k", "n")),
        *((name, ctypes.c_void_p) for name in ("x", "y", "codes")),
        ("num_rows", ctypes.c_int64),
    )


class _Params(ctypes.Structure):
    """`experts_params` of experts.c."""

    _fields_ = (
        *((name, _Layer) for name in ("up", "down")),
        *((name, ctypes.c_int64) for name in ("num_experts", "size", "is_gated", "activation")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "up_offset")),
    )


@dataclass(frozen=True, slots=True)
class _Gate:
    """activation(alpha * gate) / alpha * (up + up_offset), where gate and up are limited."""

    activation: str
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gated = ACTIVATIONS[self.activation](self.alpha * gate.clamp(max=self.limit)) / self.alpha
        return gated * (up.clamp(-self.limit, self.limit) + self.up_offset)


class _PackedLayer:
    """One linear layer of all experts."""

    def __init__(self, experts: Any, name: str, gemms: GemmSelector, kernels: CpuKernels) -> None:
        """ValueError without a kernel."""
        parameter = getattr(experts, name)
        order = _order(experts, name, parameter.shape[2 if experts.is_transposed else 1])
        self.outputs = order.shape[1]
        rows = pad(order, (0, -self.outputs % TILE_N)).flatten()  # outputs that fill up tiles are not read
        gemm, dtype = gemms.expert_gemm(
            lambda expert: _expert(experts, name, expert, rows), len(parameter), parameter.dtype
        )
        if gemm.in_features % 2 or dtype not in DTYPES:
            raise ValueError(f"no kernel for {gemm.in_features} inputs in {dtype}")
        self.dtype, self.rounds_inputs, self._gemm = dtype, getattr(gemm, "rounds_inputs", False), gemm
        self._bias = getattr(experts, f"{name}_bias").detach()[:, rows].to(dtype) if experts.has_bias else None
        function, address = gemm.for_experts
        self.params = _Layer(
            multiply=kernels.address(function, dtype),
            quantize=kernels.address("quantize_expert_row", dtype) if self.rounds_inputs else None,
            weight=address,
            bias=None if self._bias is None else self._bias.data_ptr(),
            stride=gemm.num_bytes,
            k=gemm.in_features,
            n=len(rows),
        )


def _expert(experts: Any, name: str, index: int, outputs: Tensor) -> Tensor | QuantizedWeight:
    """Some outputs of the weight [outputs, inputs] of an expert, which is in files or was loaded."""
    parameter, stored = getattr(experts, name).detach(), getattr(experts, "stored", {})
    weight = stored[name].expert(index, parameter.dtype) if name in stored else parameter[index]
    if isinstance(weight, QuantizedWeight):
        return weight.part(outputs, 0)
    return (weight.mT if experts.is_transposed else weight)[outputs]


def _order(experts: Any, name: str, outputs: int) -> Tensor:
    """The outputs of a layer in the order of our kernel, [parts, outputs]: gate and up are two parts."""
    order = torch.arange(outputs)
    if not name.startswith("gate_up"):
        return order[None]
    return order.unflatten(0, (2, -1)) if experts.is_concatenated else order.unflatten(0, (-1, 2)).T


class PackedExperts(nn.Module):  # type: ignore[misc]
    """What takes the place of a module of experts."""

    runs_cpu_kernel = True

    def __init__(self, experts: Any, gate: _Gate, gemms: GemmSelector, kernels: CpuKernels) -> None:
        """ValueError without kernels for its sizes, or for sizes that do not fit together."""
        super().__init__()
        names = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
        self._up, self._down = (_PackedLayer(experts, name, gemms, kernels) for name in names)
        if (self._up.params.k, self._down.params.k) != (self._down.outputs, self._up.outputs):
            raise ValueError("the shapes of its weights do not fit")
        self.rounds_inputs = self._up.rounds_inputs
        self._params = _Params(
            self._up.params,
            self._down.params,
            num_experts=experts.num_experts,
            size=self._up.outputs,
            is_gated=experts.has_gate,
            activation=list(ACTIVATIONS).index(gate.activation),
            alpha=gate.alpha,
            limit=gate.limit,
            up_offset=gate.up_offset,
        )
        argtypes = [ctypes.c_void_p] * 9 + [ctypes.c_int64] * 3
        self._function = kernels.function("experts", self._up.dtype, argtypes, ctypes.c_int)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The outputs [tokens, hidden] of states of this shape, for experts and their weights [tokens, k]."""
        x, ids, weights = hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.float().contiguous()
        assert (x.dtype, ids.dtype) == (self._up.dtype, torch.int64), (x.dtype, ids.dtype)
        (tokens, top_k), experts, up, down = ids.shape, self._params.num_experts, self._up.params, self._down.params
        pairs, width = tokens * top_k, max(up.k, down.k)
        rows = pairs + (_ALIGNMENT - 1) * min(pairs, experts)
        inputs, outputs, y = x.new_empty(rows, width), x.new_empty(rows, max(up.n, down.n)), torch.empty_like(x)
        codes = torch.empty(rows, width + GROUP if self.rounds_inputs else 0)  # 4 bytes for each padded input
        plan = ids.new_empty(experts + (1 + _BLOCK_WORDS) * pairs + rows)
        pointers = [tensor.data_ptr() for tensor in (x, ids, weights, y, inputs, outputs, codes, plan)]
        failed = self._function(ctypes.addressof(self._params), *pointers, tokens, top_k, torch.get_num_threads())
        assert not failed, "a router chose an expert that does not exist"
        return y


class _RouterWeight:
    """What takes the place of a router's weight in F.linear, whose result is in float32."""

    dtype = torch.float32

    def __init__(self, gemm: Gemm) -> None:
        self._gemm = gemm

    def float(self) -> "_RouterWeight":
        return self

    def type(self, _: torch.dtype) -> "_RouterWeight":
        return self

    @classmethod
    def __torch_function__(cls, function: Any, _: object, args: Any = (), kwargs: Any = None) -> Any:
        if function is not linear:
            return NotImplemented

        def logits(x: Tensor, weight: "_RouterWeight", bias: Tensor | None = None) -> Tensor:
            return weight._gemm(x.float(), None if bias is None else bias.float())

        return logits(*args, **kwargs or {})


def experts_of(model: nn.Module) -> dict[str, Any]:
    """The modules of transformers' ExpertsInterface in a model, by path."""
    modules = model.named_modules()
    return {path: x for path, x in modules if hasattr(x, "_apply_gate") and hasattr(x, "is_concatenated")}


def has_packed_experts(model: nn.Module) -> bool:
    return any(isinstance(module, PackedExperts) for module in model.modules())


def packable_experts(model: nn.Module, kernels: CpuKernels) -> dict[type, _Gate]:
    """The classes of experts in a model whose formula our kernels compute, with their gates."""
    kinds = {type(experts): experts for experts in experts_of(model).values()}
    gates = {kind: output_of(_gate_of, experts, kernels, name=kind.__name__) for kind, experts in kinds.items()}
    return {kind: gate for kind, gate in gates.items() if gate is not None}


def pack_experts(model: PreTrainedModel, gemms: GemmSelector, kernels: CpuKernels) -> int:
    """Replace the experts of a CPU model, and their routers, in place; how many layers have others from then on."""
    gates, paths = packable_experts(model, kernels), [*experts_of(model)]
    reasons: Counter[str] = Counter()
    for path in paths:
        experts, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
        kind = type(experts)
        try:
            if kind not in gates:
                raise ValueError("our kernels compute another formula")
            model.set_submodule(path, PackedExperts(experts, gates[kind], gemms, kernels))
        except ValueError as error:
            reasons[f"{kind.__name__}: {error}"] += 1
            continue
        for child in parent.children():
            _pack_router(child, gemms)
    for reason, count in reasons.items():
        log.warning("experts of %d layers are not packed, %s", count, reason)
    return len(paths) - reasons.total()


def _gate_of(experts: Any, kernels: CpuKernels) -> _Gate | None:
    """The gate of a module; None if our kernels do not compute what it does. A few small experts show it."""
    x = inputs_of_all_sizes()
    gate, up = (x[:, ::2], x[:, 1::2]) if not experts.is_concatenated else x.chunk(2, -1)
    alpha, limit = (getattr(experts, name, None) or 1.0 for name in ("alpha", "limit"))
    forms = [(), (1.0, limit), (alpha, limit, 1.0)]
    output = experts._apply_gate(x.clone()) if experts.has_gate else experts.act_fn(gate)
    for form, activation in product(forms, ACTIVATIONS):
        formula = _Gate(activation, *form)
        computed = formula(gate, up if experts.has_gate else torch.ones_like(gate))
        if rows_close(computed, output) and _computes(experts, formula, kernels):
            return formula
    return None


def _computes(experts: Any, gate: _Gate, kernels: CpuKernels) -> bool:
    """Whether few small experts of this class give what transformers computes."""
    num_experts, hidden, size = 3, 24, 40
    probe, draw = copy.copy(experts), torch.Generator().manual_seed(0)
    probe.stored = {}
    up, name = (2 * size, "gate_up_proj") if experts.has_gate else (size, "up_proj")
    shapes = {name: (up, hidden), "down_proj": (hidden, size)}
    weights = {
        name: torch.randn(num_experts, *(shape[::-1] if experts.is_transposed else shape), generator=draw)
        for name, shape in shapes.items()
    }
    biases = {f"{name}_bias": torch.randn(num_experts, shape[0], generator=draw) for name, shape in shapes.items()}
    probe._parameters, probe.num_experts = weights | (biases if experts.has_bias else {}), num_experts
    ids = torch.tensor([[0, 1], [2, 0], [0, 2], [1, 0], [0, 1]])
    x, factors = torch.randn(5, hidden, generator=draw), torch.rand(5, 2, generator=draw)
    expected = batched_mm_experts_forward(probe, x, ids, factors)
    has_norm = getattr(experts, "has_post_expert_norm", False)
    return not has_norm and agrees(
        PackedExperts(probe, gate, GemmSelector(kernels), kernels)(x, ids, factors), expected, torch.float32
    )


def _pack_router(router: Any, gemms: GemmSelector) -> None:
    """Let our GEMM multiply by the weight of a router, if it is an argument of F.linear only."""
    weight = getattr(router, "weight", None)
    if weight is None or weight.ndim != 2 or type(router) in (nn.Linear, nn.Embedding):
        return
    gemm = gemms.gemm(weight.detach(), torch.float32)
    if gemm is None:
        return
    del router.weight
    router.weight = _RouterWeight(gemm)
    x, bias = (torch.randn(*size, dtype=weight.dtype) for size in ((2, weight.shape[1]), weight.shape[:1]))
    inputs = (x, bias)[: len(signature(router.forward).parameters)]  # some get a bias for the choice of experts
    if output_of(router, *inputs, name=type(router).__name__) is None:
        del router.weight
        router.register_parameter("weight", weight)
