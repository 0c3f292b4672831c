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
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.linear import Gemm, cpu_gemm
from tgis.engines.loading.merged_linear import MergedLinear, MergedLinearSlice
from tgis.engines.lora.adapter_bank import AdapterBank
from tgis.prompts.lora import LoraAdapter

_IDLE_PASSES = 64  # that an adapter stays in the stack when no row has it


def lora_of(row: Row) -> LoraAdapter | None:
    """The row's adapter, if it has one."""
    return row.adapter if isinstance(row.adapter, LoraAdapter) else None


class LoraLayers:
    """The linear layers of a model, which compute what they always do unless `applied` is open; None has no layers."""

    def __init__(self, model: PreTrainedModel | None, kernels: CpuKernels | None = None) -> None:
        self._kernels = kernels
        self._modules = {} if model is None else dict(_lora_targets(model))
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._bank = AdapterBank({name: _dtype(module) for name, module in self._modules.items()})
        self._gemms: dict[str, tuple[Gemm, Gemm]] = {}  # with what is in the stack, once they are needed
        self._last_used: dict[LoraAdapter, int] = {}  # number of the pass, of at least those in the stack
        self._num_passes = 0
        self._foreign_columns: Tensor | None = (
            None  # bool [parts, 1, columns]: what parts do not keep; None: none has any
        )

    @property
    def targets(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each layer that adapters may change, by its name."""
        return {name: _shape(module) for name, module in self._modules.items()}

    @contextmanager
    def applied(self, adapters: Sequence[LoraAdapter | None]) -> Iterator[None]:
        """Change the layers: of as many equal parts as there are adapters, rows or tokens, each part by its own."""
        outer = self._foreign_columns
        used = {adapter for adapter in adapters if adapter is not None}
        if outer is None:  # else another pass is in the middle of it, which has all of these
            self._update_bank(used)
        self._foreign_columns = self._bank.foreign_columns(adapters) if used else None
        try:
            yield
        finally:
            self._foreign_columns = outer

    def _update_bank(self, used: set[LoraAdapter]) -> None:
        """See to it that all that are used are in the stack, and none for long that are not."""
        self._num_passes += 1
        self._last_used |= dict.fromkeys(used, self._num_passes)
        old = {adapter for adapter, last in self._last_used.items() if self._num_passes - last > _IDLE_PASSES}
        for adapter in old:
            del self._last_used[adapter]
        new = used - self._bank.adapters
        if new or old:
            self._gemms = {}
            self._bank.update(new, old & self._bank.adapters)
            self._update_hooks()

    def _update_hooks(self) -> None:
        """Only what some adapter changes is slowed down."""
        names = self._bank.layers.keys()
        for name in self._hooks.keys() - names:
            self._hooks.pop(name).remove()
        for name in names - self._hooks.keys():
            self._hooks[name] = self._modules[name].register_forward_hook(self._forward_hook(name))

    def _forward_hook(self, name: str) -> Any:
        def change(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            if self._foreign_columns is not None:
                _add_lora(output, inputs[0], *self._gemms_of(name), self._foreign_columns)

        return change

    def _gemms_of(self, name: str) -> tuple[Gemm, Gemm]:
        if name not in self._gemms:
            down, up = self._bank.layers[name]
            self._gemms[name] = _gemm(down, self._kernels), _gemm(up.T, self._kernels)
        return self._gemms[name]


def _add_lora(output: Tensor, x: Tensor, down: Gemm, up: Gemm, foreign: Tensor) -> None:
    """Change [..., out] in place by what adapters make of `x` [..., in]; its parts are behind one another."""
    hidden = down(x, None)  # [..., columns]
    hidden.view(len(foreign), -1, hidden.shape[-1]).masked_fill_(foreign, 0.0)
    output.add_(up(hidden, None))


def _gemm(weight: Tensor, kernels: CpuKernels | None) -> Gemm:
    """With a weight [out, in]; oneDNN's packed one would take longer to set up than to compute what is so small."""
    return cpu_gemm(weight, kernels) or (lambda x, bias: linear(x, weight, bias))


def _lora_targets(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Not the one that makes logits, nor experts: these see some of the tokens only, in an order of their own."""
    others = {model.get_output_embeddings(), *(one.linear for one in model.modules() if isinstance(one, MergedLinear))}
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear | Conv1D | MergedLinearSlice)
            and module not in others
            and "experts" not in name.split(".")
        ):
            yield name, module


def _shape(module: Any) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    return module.in_features, module.out_features


def _dtype(module: Any) -> torch.dtype:
    weight: Tensor = (module.merged.linear if isinstance(module, MergedLinearSlice) else module).weight
    return weight.dtype
