"""Mixtures of experts on the CPU, by experts.c: each linear layer of all experts together is one packed weight.

Modules of transformers' ExpertsInterface are replaced, as far as they compute the formula of experts.c. Others, and
classes that do not use this interface, run as transformers has them.
"""

import copy
import ctypes
import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.integrations.moe import batched_mm_experts_forward

from tgis.engines.kernels.cpu.activations import ACTIVATIONS
from tgis.engines.kernels.cpu.gemm import TILE_N
from tgis.engines.kernels.cpu.library import DTYPES, FLOAT, INTEGER, POINTER, CpuKernels, structure
from tgis.engines.kernels.cpu.linear import GemmSelector, WeightArgument
from tgis.engines.kernels.cpu.probes import inputs_of_all_sizes, output_of, rows_close
from tgis.engines.quantization.weight import GROUP, QuantizedWeight

log = logging.getLogger(__name__)

# By name of parameter: these rows of its weight [experts * outputs, inputs].
ReadRows = Callable[[str, Tensor], Tensor | QuantizedWeight]
_ALIGNMENT = 8  # rows of an expert begin at a multiple, as in experts.h
_BLOCK_WORDS = 5  # int64 in an expert_block


class _Gate(NamedTuple):
    """activation(alpha * gate) / alpha * (up + up_offset), where gate and up are limited."""

    activation: int  # index in ACTIVATIONS
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0


# `expert_layer` of experts.h and `experts_params` of experts.c.
_Layer = structure(
    ("multiply quantize weight bias", POINTER), ("k n", INTEGER), ("x y codes", POINTER), ("num_rows", INTEGER)
)
_Params = structure(
    ("up down", _Layer), ("num_experts size is_gated activation", INTEGER), ("alpha limit up_offset", FLOAT)
)


class _PackedLayer:
    """One linear layer of all experts."""

    def __init__(self, experts: Any, name: str, read: ReadRows, gemms: GemmSelector, kernels: CpuKernels) -> None:
        weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias").detach() if experts.has_bias else None
        count, outputs, self.inputs = (weight.mT if experts.is_transposed else weight).shape
        order = torch.arange(outputs)[None]
        if name == "gate_up_proj":  # the kernel has gate and up one after the other, each filled up to full tiles
            order = order.view(2, -1) if experts.is_concatenated else order.view(-1, 2).T
        self.outputs = order.shape[1]
        rows = pad(order, (0, -self.outputs % TILE_N)).flatten()
        all_rows = (torch.arange(count)[:, None] * outputs + rows).flatten()
        self._gemm = gemm = gemms.expert_gemm(read(name, all_rows), weight.dtype)
        self._bias = None if bias is None else bias[:, rows].to(gemm.dtype)
        self.dtype, self.rounds_inputs = gemm.dtype, getattr(gemm, "rounds_inputs", False)
        function, address = gemm.for_experts
        self.params = _Layer(
            multiply=kernels.address(function, self.dtype),
            quantize=kernels.address("quantize_expert_row", self.dtype) if self.rounds_inputs else None,
            weight=address,
            bias=None if self._bias is None else self._bias.data_ptr(),
            k=self.inputs,
            n=len(rows),
        )


def matrix_of(experts: Any, weight: Tensor) -> Tensor:
    """A weight of experts as [experts * outputs, inputs]."""
    return (weight.mT if experts.is_transposed else weight).flatten(0, 1)


class PackedExperts(nn.Module):  # type: ignore[misc]
    """What takes the place of a module of experts."""

    runs_cpu_kernel = True

    def __init__(self, experts: Any, gate: _Gate, read: ReadRows, gemms: GemmSelector, kernels: CpuKernels) -> None:
        super().__init__()
        names = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
        self._up, self._down = (_PackedLayer(experts, name, read, gemms, kernels) for name in names)
        assert (self._up.inputs, self._down.inputs) == (self._down.outputs, self._up.outputs)
        self.rounds_inputs = self._up.rounds_inputs or self._down.rounds_inputs
        sizes = experts.num_experts, self._up.outputs, experts.has_gate
        self._params = _Params(self._up.params, self._down.params, *sizes, *gate)
        self._function = kernels.function("experts", self._up.dtype, [POINTER] * 9 + [INTEGER] * 3, ctypes.c_int)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The outputs [tokens, hidden] of states of this shape, for experts and their weights [tokens, k]."""
        x = hidden_states.to(self._up.dtype).contiguous()
        ids, weights = top_k_index.contiguous(), top_k_weights.float().contiguous()
        assert ids.dtype == torch.int64, ids.dtype
        (tokens, top_k), experts, up, down = ids.shape, self._params.num_experts, self._up.params, self._down.params
        pairs, width = tokens * top_k, max(up.k, down.k)
        rows = pairs + (_ALIGNMENT - 1) * min(pairs, experts)
        inputs, outputs, y = x.new_empty(rows, width), x.new_empty(rows, max(up.n, down.n)), torch.empty_like(x)
        codes = torch.empty(rows, width + GROUP if self.rounds_inputs else 0)  # 4 bytes for each padded input
        plan = ids.new_empty(experts + (1 + _BLOCK_WORDS) * pairs + rows)
        pointers = [tensor.data_ptr() for tensor in (x, ids, weights, y, inputs, outputs, codes, plan)]
        failed = self._function(ctypes.addressof(self._params), *pointers, tokens, top_k, torch.get_num_threads())
        assert not failed, "a router chose an expert that does not exist"
        return y.to(hidden_states.dtype)


def experts_of(model: nn.Module) -> dict[str, Any]:
    """The modules of transformers' ExpertsInterface in a model, by path."""
    modules = model.named_modules()
    return {path: x for path, x in modules if hasattr(x, "_apply_gate") and hasattr(x, "is_concatenated")}


def packable_experts(model: nn.Module, kernels: CpuKernels, dtype: torch.dtype) -> dict[str, _Gate]:
    """The experts in a model that our kernels compute with activations of a dtype, by path, with their gates."""
    experts = {
        path: module
        for path, module in experts_of(model).items()
        if dtype in DTYPES and not any(size % 2 for size in module.down_proj.shape[1:])
    }
    kinds = {type(module): module for module in experts.values()}
    gates = {kind: output_of(_gate_of, module, kernels, name=kind.__name__) for kind, module in kinds.items()}
    return {path: gate for path, module in experts.items() if (gate := gates[type(module)])}


def pack_experts(
    model: nn.Module, gemms: GemmSelector, kernels: CpuKernels, dtype: torch.dtype, read: Callable[..., Any]
) -> None:
    """Replace the experts of a CPU model, and their routers, in place. `read` gives rows of a weight by the path of the
    experts, the name of the parameter, and the indices of the rows.
    """
    gates, others = packable_experts(model, kernels, dtype), Counter[str]()
    for path in [*experts_of(model)]:  # frees each layer as soon as it is packed
        experts, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
        if path not in gates:
            others[type(experts).__name__] += 1
            continue
        model.set_submodule(path, PackedExperts(experts, gates[path], partial(read, path), gemms, kernels))
        for child in parent.children():
            _pack_router(child, gemms)
    for kind, count in others.items():
        log.warning(
            "experts of %d layers are not packed: no kernel computes %s of these sizes in %s", count, kind, dtype
        )
    if gates:
        log.info("packed the experts of %d layers", len(gates))


def _gate_of(experts: Any, kernels: CpuKernels) -> _Gate | None:
    """The gate with which our kernels give what a module does; None if there is none. Small experts show it."""
    count, size, x, draw = 3, 40, inputs_of_all_sizes(), torch.Generator().manual_seed(0)
    up = ("gate_up_proj", 2 * size) if experts.has_gate else ("up_proj", size)
    parameters = {}
    for name, outputs, inputs in ((*up, x.shape[1]), ("down_proj", x.shape[1], size)):
        sizes = (inputs, outputs) if experts.is_transposed else (outputs, inputs)
        parameters[name] = torch.randn(count, *sizes, generator=draw)
        parameters[f"{name}_bias"] = torch.randn(count, outputs, generator=draw)
    probe = copy.copy(experts)
    probe._parameters, probe.num_experts = parameters, count
    ids = torch.rand(len(x), count, generator=draw).topk(2).indices
    factors = torch.rand(ids.shape, generator=draw)
    expected = batched_mm_experts_forward(probe, x, ids, factors)
    alpha, limit = (getattr(experts, name, None) or 1.0 for name in ("alpha", "limit"))
    gemms = GemmSelector(kernels)
    for form, activation in product([(), (1.0, limit), (alpha, limit, 1.0)], range(len(ACTIVATIONS))):
        gate = _Gate(activation, *form)
        read = lambda name, rows: matrix_of(probe, parameters[name])[rows]  # noqa: E731
        packed = PackedExperts(probe, gate, read, gemms, kernels)
        if rows_close(expected, packed(x, ids, factors)):
            return gate
    return None


def _pack_router(router: Any, gemms: GemmSelector) -> None:
    """Let our GEMM multiply by the weight of a router, if it is an argument of F.linear only."""
    weight = getattr(router, "weight", None)
    if weight is None or weight.ndim != 2 or type(router) in (nn.Linear, nn.Embedding):
        return
    del router.weight
    router.weight = WeightArgument(gemms.gemm(weight.detach(), torch.float32))
    x, bias = (torch.randn(*size, dtype=weight.dtype) for size in ((2, weight.shape[1]), weight.shape[:1]))
    inputs = (x, bias)[: len(signature(router.forward).parameters)]  # some get a bias for the choice of experts
    if output_of(router, *inputs, name=type(router).__name__) is None:
        del router.weight
        router.register_parameter("weight", weight)
