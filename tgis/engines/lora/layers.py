"""LoRA adapters in a pass: what each adds to linear layers, for its own rows and no others, all in the same products.

Of its product with the first matrices of all adapters a row keeps that with its own, before the product with the
second: two products and a mask for a layer, however many adapters there are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tgis.batcher.sequence import Sequence as Row
from tgis.engines.kernels.cpu.linear import OurProduct, Product, has_kernel
from tgis.engines.loading.merged_linear import Part, Siblings
from tgis.engines.lora.adapter_bank import LoraStack
from tgis.prompts.lora import LoraAdapter

_KEPT_PASSES = 64  # that an adapter stays in the stack when no row has it


def lora_of(row: Row) -> LoraAdapter | None:
    """The row's adapter, if it has one."""
    return row.prefix if isinstance(row.prefix, LoraAdapter) else None


class LoraLayers:
    """The linear layers of a model, which compute what they always do unless `applied` is open; None has no layers."""

    def __init__(self, network: PreTrainedModel | None) -> None:
        self._modules = {} if network is None else dict(_linears(network))
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._stack = LoraStack({name: _dtype(module) for name, module in self._modules.items()})
        self._products: dict[str, tuple[Product, Product]] = {}  # with what is in the stack, once they are needed
        self._last_used: dict[LoraAdapter, int] = {}  # number of the pass, of at least those in the stack
        self._pass = 0
        self._foreign: Tensor | None = None  # bool [parts, 1, columns]: what parts do not keep; None: none has any

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each layer that adapters may change, by its name."""
        return {name: _shape(module) for name, module in self._modules.items()}

    @contextmanager
    def applied(self, adapters: Sequence[LoraAdapter | None]) -> Iterator[None]:
        """Change the layers: of as many equal parts as there are adapters, rows or tokens, each part by its own."""
        outer = self._foreign
        used = {adapter for adapter in adapters if adapter is not None}
        if outer is None:  # else another pass is in the middle of it, which has all of these
            self._arrange(used)
        self._foreign = self._stack.foreign(adapters) if used else None
        try:
            yield
        finally:
            self._foreign = outer

    def _arrange(self, used: set[LoraAdapter]) -> None:
        """See to it that all that are used are in the stack, and none for long that are not."""
        self._pass += 1
        self._last_used |= dict.fromkeys(used, self._pass)
        old = {adapter for adapter, last in self._last_used.items() if self._pass - last > _KEPT_PASSES}
        for adapter in old:
            del self._last_used[adapter]
        new = used - self._stack.adapters
        if new or old:
            self._products = {}
            self._stack.change(new, old & self._stack.adapters)
            self._hook()

    def _hook(self) -> None:
        """Only what some adapter changes is slowed down."""
        names = self._stack.layers.keys()
        for name in self._hooks.keys() - names:
            self._hooks.pop(name).remove()
        for name in names - self._hooks.keys():
            self._hooks[name] = self._modules[name].register_forward_hook(self._change(name))

    def _change(self, name: str) -> Any:
        def change(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            if self._foreign is not None:
                _add(output, inputs[0], *self._products_of(name), self._foreign)

        return change

    def _products_of(self, name: str) -> tuple[Product, Product]:
        if name not in self._products:
            down, up = self._stack.layers[name]
            self._products[name] = _product(down), _product(up.T)
        return self._products[name]


def _add(output: Tensor, x: Tensor, down: Product, up: Product, foreign: Tensor) -> None:
    """Change [..., out] in place by what adapters make of `x` [..., in]; its parts are behind one another."""
    hidden = down(x, None)  # [..., columns]
    hidden.view(len(foreign), -1, hidden.shape[-1]).masked_fill_(foreign, 0.0)
    output.add_(up(hidden, None))


def _product(weight: Tensor) -> Product:
    """With a weight [out, in], packed where that is of use: oneDNN takes as long to begin as for what is so small."""
    if weight.device.type == "cpu" and has_kernel(weight):
        return OurProduct(weight)
    return lambda x, bias: linear(x, weight, bias)


def _linears(network: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Not the one that makes logits, nor experts: these see some of the tokens only, in an order of their own."""
    others = {network.get_output_embeddings(), *(one.linear for one in network.modules() if isinstance(one, Siblings))}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | Conv1D | Part) and module not in others and "experts" not in name.split("."):
            yield name, module


def _shape(module: Any) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    return module.in_features, module.out_features


def _dtype(module: Any) -> torch.dtype:
    weight: Tensor = (module.product.linear if isinstance(module, Part) else module).weight
    return weight.dtype
