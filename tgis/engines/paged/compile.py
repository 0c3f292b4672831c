"""PT2_COMPILE: torch.compile of the decoder layers, with their linear layers and attention as they are.

Layers of the same kind share a graph, which is compiled once: it does not depend on the layer's index, and gets the
layer's KV cache as inputs. Attention is a custom operator, since compilers do not know paged caches, and so is the
change by LoRA adapters, which come and go; passes with adapters have their own graphs. What ranks add up and gather
are operators, too: graphs can be made without. Steps that would need a graph beyond those made at startup run eagerly:
no request waits for a compiler.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgis.engines.kernels.attention_inputs import AttentionParams
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.paged.attention import PagedAttention
from tgis.engines.paged.self_check import on_all_ranks, verify_steps
from tgis.errors import Unsupported

_NAMESPACE = "tgis_paged"  # constant: names are part of the key of torch's cache of compiled graphs
_ATTEND = (
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, float? scale, int? window, float? cap,"
    " Tensor? sinks, Tensor? bias, int? bias_origin) -> Tensor"
)
_MAX_GRAPHS = 16  # four kinds of layers, one token or several, adapters or none
_REDUCE = "all_reduce(Tensor(a!) x) -> ()"
_GATHER = "all_gather(Tensor x, int ranks) -> Tensor"
_CHANGE = "lora(Tensor layer, Tensor x, Tensor output) -> Tensor"
_running: ContextVar["CompiledLayers"] = ContextVar("the layers of the engine whose step runs")


def can_compile(model: PreTrainedModel) -> bool:
    """Whether compiling gains anything: not where CPU kernels have replaced the operators."""
    return not any(getattr(module, "runs_cpu_kernel", False) for module in model.modules())


class CompiledLayers:
    """The decoder layers of one engine's model; they are compiled between `enable` and `freeze` only."""

    def __init__(self, model: PreTrainedModel, attention: PagedAttention, lora: LoraLayers | None = None) -> None:
        """`lora` is None if no pass ever has adapters."""
        self._layers = _decoder_layers(model)
        self.attention, self.lora = attention, lora
        self._eager_operator = attention.operator
        self._sharding = getattr(model, "sharding", None)
        self.collectives: Any = self._sharding and self._sharding.collectives
        self.communicates = True
        self._dtype = model.dtype
        self._stance = "default"

    def enable(self) -> None:
        """Compile a graph for every step that has none."""
        for index, module in self.attention.modules.items():
            for name, states in zip(("key_cache", "value_cache"), self.attention.cache[index], strict=True):
                module.register_buffer(name, states, persistent=False)
        _library()
        self.attention.operator = _call_attend
        if self.lora:
            for index, module in enumerate(self.lora.modules):
                module.register_buffer("lora_layer", torch.tensor([index]), persistent=False)
            self.lora.use_operator(_call_lora)
        if self._sharding:
            self._sharding.collectives = _CompiledCollectives()
        torch._dynamo.config.recompile_limit = _MAX_GRAPHS
        for layer in self._layers:
            layer.compile(dynamic=True)

    def make_graphs(self, run: Callable[[], Tensor], eager_logits: Tensor) -> None:
        """Compile the graphs of some passes; Unsupported, on all ranks, unless they give these logits."""
        self.communicates = False  # a rank whose compiler fails leaves no other one waiting
        try:
            on_all_ranks(run)
        finally:
            self.communicates = True
        on_all_ranks(lambda: verify_steps("compiled", run(), eager_logits, self._dtype))

    def freeze(self) -> None:
        """Stop compiling: steps without a graph run eagerly from now on."""
        self._stance = "eager_on_recompile"

    def disable(self) -> None:
        """Run eagerly, as before `enable`."""
        self.attention.operator = self._eager_operator
        if self.lora:
            self.lora.use_operator(None)
        for layer in self._layers:
            layer._compiled_call_impl = None
        if self._sharding:
            self._sharding.collectives = self.collectives

    def run(self, forward: Callable[[], Tensor]) -> Tensor:
        """Run a pass of the model."""
        token = _running.set(self)
        try:
            with torch.compiler.set_stance(self._stance):
                return forward()
        finally:
            _running.reset(token)


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model; Unsupported if they are not in one list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.base_model.modules():
        if type(module) is nn.ModuleList and len(module) == count:
            return list(module)
    raise Unsupported(f"{type(model).__name__} has no list of its {count} layers")


class _CompiledCollectives:
    """The collectives of the engine whose step runs, in graphs."""

    def __init__(self) -> None:
        self._num_ranks = dist.get_world_size()

    def all_reduce(self, x: Tensor) -> Tensor:
        torch.ops.tgis_paged.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.ops.tgis_paged.all_gather(x, self._num_ranks)


@cache
def _library() -> torch.library.Library:
    """The custom operators for all engines of the process; they exist as long as the library does."""
    library = torch.library.Library(_NAMESPACE, "DEF")
    for name, schema, run, fake in (
        ("attend", _ATTEND, _attend, _fake_attend),
        ("lora", _CHANGE, _lora, _fake_lora),
        ("all_reduce", _REDUCE, _all_reduce, lambda _: None),
        ("all_gather", _GATHER, _all_gather, _fake_all_gather),
    ):
        library.define(schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    return library


def _call_attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *params: Any) -> Tensor:
    return torch.ops.tgis_paged.attend(query, key, value, module.key_cache, module.value_cache, *params)


def _fake_attend(q: Tensor, _k: Tensor, v: Tensor, *_others: Any) -> Tensor:
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


def _attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *params: Any) -> Tensor:
    attention = _running.get().attention
    assert attention.batch
    return attention.attend(attention.batch.attention, q, k, v, (keys, values), AttentionParams(*params)).contiguous()


def _call_lora(module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
    return torch.ops.tgis_paged.lora(module.lora_layer, x, output)


def _fake_lora(_layer: Tensor, _x: Tensor, output: Tensor) -> Tensor:
    return output.new_empty(output.shape)


def _lora(layer: Tensor, x: Tensor, output: Tensor) -> Tensor:
    lora = _running.get().lora
    assert lora is not None
    (index,) = layer.tolist()  # on the host
    return lora.changed_output(index, x, output)


def _all_reduce(x: Tensor) -> None:
    if _running.get().communicates:
        _running.get().collectives.all_reduce(x)


def _fake_all_gather(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], ranks * x.shape[-1])


def _all_gather(x: Tensor, ranks: int) -> Tensor:
    layers = _running.get()
    return layers.collectives.all_gather(x) if layers.communicates else _fake_all_gather(x, ranks)
