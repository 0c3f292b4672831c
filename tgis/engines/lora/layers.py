"""LoRA adapters in a forward pass: each changes linear layers for its own sequences only.

A layer multiplies its input by the A matrices of all adapters, masks what belongs to other adapters, and multiplies by
the B matrices: two GEMMs and a mask, however many adapters there are.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tgis.batcher.admission import MAX_ADAPTER_RANKS
from tgis.batcher.sequence import Sequence
from tgis.engines.kernels.cpu.gemm import Gemm, cpu_gemm
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.lora.adapter_bank import AdapterBank
from tgis.engines.transfers import to_device
from tgis.prompts.lora import LoraAdapter

_IDLE_PASSES = 64  # before an adapter that no sequence has leaves the bank


def lora_of(seq: Sequence) -> LoraAdapter | None:
    return seq.adapter if isinstance(seq.adapter, LoraAdapter) else None


@dataclass(frozen=True, slots=True)
class PlacedAdapters:
    """The adapters of a pass, by part of its inputs."""

    first_columns: Tensor  # int64 [parts], in the bank
    version: int  # of the bank: a pass that was recorded with another one reads something else


class LoraLayers:
    """The linear layers of a model, which adapters change inside of `applied` and `using`; None has no layers."""

    def __init__(self, model: PreTrainedModel | None, kernels: CpuKernels | None = None, min_columns: int = 0) -> None:
        """With `min_columns` of the bank, passes can be captured and replayed with other adapters."""
        self._kernels = kernels
        self._modules = {} if model is None else dict(_lora_targets(model))
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._bank = AdapterBank({name: module.weight.dtype for name, module in self._modules.items()}, min_columns)
        self._gemms: dict[str, tuple[Gemm, Gemm]] = {}  # with the A and B matrices, packed when first needed
        self._last_used: dict[LoraAdapter, int] = {}  # number of the pass; every adapter in the bank is here
        self._num_passes = 0
        self._foreign_columns: Tensor | None = None  # bool [parts, 1, columns], to mask; None without adapters

    @property
    def targets(self) -> dict[str, tuple[int, int]]:
        """Input and output sizes of the layers that adapters may change, by name."""
        return {name: _shape(module) for name, module in self._modules.items()}

    def place(self, adapters: Collection[LoraAdapter | None]) -> list[int]:
        """The first column of each adapter in the bank, to which new ones are added; none if nobody has an adapter."""
        used = {adapter for adapter in adapters if adapter is not None}
        if self._foreign_columns is None:  # nested: the outer pass has all of these
            self._update_bank(used)
        return self._bank.first_columns(adapters) if used else []

    def placed(self, first_columns: Tensor) -> PlacedAdapters | None:
        """What `place` has returned, on the device."""
        return PlacedAdapters(first_columns, self._bank.version) if len(first_columns) else None

    @contextmanager
    def applied(self, adapters: Collection[LoraAdapter | None]) -> Iterator[None]:
        """Change the layers inside of the block: their inputs have one part per adapter (a row, or a token)."""
        with self.using(self.placed(to_device(self.place(adapters), torch.int64, self._bank.device))):
            yield

    @contextmanager
    def using(self, placed: PlacedAdapters | None) -> Iterator[None]:
        """The same with adapters that are in the bank."""
        outer = self._foreign_columns
        self._foreign_columns = None if placed is None else self._bank.foreign_columns(placed.first_columns)
        try:
            yield
        finally:
            self._foreign_columns = outer

    def _update_bank(self, used: set[LoraAdapter]) -> None:
        self._num_passes += 1
        self._last_used |= dict.fromkeys(used, self._num_passes)
        new = used - self._bank.adapters
        full = bool(new) and sum(adapter.rank for adapter in self._last_used) > MAX_ADAPTER_RANKS
        idle = 0 if full else _IDLE_PASSES
        old = {adapter for adapter, last in self._last_used.items() if self._num_passes - last > idle}
        for adapter in old:
            del self._last_used[adapter]
        if new or old:
            self._gemms = {}  # which hold what a larger bank replaces
            try:
                self._bank.update(new, old & self._bank.adapters)
            finally:
                self._update_hooks()
        if used and not self._gemms:  # not in the pass, which may be recorded
            self._gemms = {name: self._make_gemms(name) for name in self._bank.layers}

    def _update_hooks(self) -> None:
        """Hook only layers that some adapter changes, since hooks cost time."""
        names = self._bank.layers.keys()
        for name in self._hooks.keys() - names:
            self._hooks.pop(name).remove()
        for name in names - self._hooks.keys():
            self._hooks[name] = self._modules[name].register_forward_hook(self._forward_hook(name))

    def _forward_hook(self, name: str) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            if self._foreign_columns is not None:
                _add_lora(output, inputs[0], *self._gemms[name], self._foreign_columns)

        return hook

    def _make_gemms(self, name: str) -> tuple[Gemm, Gemm]:
        down, up = self._bank.layers[name]
        return _gemm(down, self._kernels), _gemm(up.T, self._kernels)


def _add_lora(output: Tensor, x: Tensor, down: Gemm, up: Gemm, foreign: Tensor) -> None:
    """Add to `output` [..., out] in place what the adapters make of `x` [..., in], whose parts are consecutive."""
    hidden = down(x, None)  # [..., columns]
    hidden.view(len(foreign), -1, hidden.shape[-1]).masked_fill_(foreign, 0.0)
    output.add_(up(hidden, None))


def _gemm(weight: Tensor, kernels: CpuKernels | None) -> Gemm:
    """With our kernel if possible: for weights this small, oneDNN's overhead is as large as the product."""
    return cpu_gemm(weight, kernels) or (lambda x, bias: linear(x, weight, bias))


def _lora_targets(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """All linear layers but the head and experts, which see only some tokens, in an order of their own."""
    head = model.get_output_embeddings()
    inside = "."  # of the last target, such as the weights that a slice shares with others
    for name, module in model.named_modules():
        is_linear = isinstance(module, Conv1D) or hasattr(module, "in_features")
        if is_linear and module is not head and "experts" not in name.split(".") and not name.startswith(inside):
            inside = f"{name}."
            yield name, module


def _shape(module: Any) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        inputs, outputs = module.weight.shape
        return inputs, outputs
    return module.in_features, module.out_features
