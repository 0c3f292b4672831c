"""LoRA adapters in a forward pass: each changes linear layers for its own sequences only.

A layer multiplies its input by the A matrices of all adapters, masks what belongs to other adapters, and multiplies by
the B matrices: two GEMMs and a mask, however many adapters there are.
"""

from collections.abc import Callable, Collection, Iterator
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
from tgis.engines.host_memory import to_device
from tgis.engines.kernels.cpu.gemm import Gemm, our_gemms
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.lora.adapter_bank import AdapterBank
from tgis.prompts.lora import LoraAdapter

_IDLE_PASSES = 64  # after which an unused adapter leaves the bank


def lora_of(seq: Sequence) -> LoraAdapter | None:
    return seq.adapter if isinstance(seq.adapter, LoraAdapter) else None


@dataclass(frozen=True, slots=True)
class PlacedAdapters:
    """The adapters of a pass, one for each part of its inputs."""

    first_columns: Tensor  # int64 [parts], in the bank
    version: int  # version of the bank; a pass recorded with another version reads other adapters


class LoraLayers:
    """The linear layers of a model, which adapters change inside `applied` and `using`; no layers without a model."""

    def __init__(self, model: PreTrainedModel | None, kernels: CpuKernels | None = None, min_columns: int = 0) -> None:
        """If the bank has `min_columns`, passes can be captured, and replayed with other adapters."""
        self._kernels = kernels
        self._modules = {} if model is None else dict(_lora_targets(model))
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._sharding = getattr(model, "sharding", None)
        shard = self._sharding.own_factors if self._sharding else None
        dtypes = {name: module.weight.dtype for name, module in self._modules.items()}
        self._bank = AdapterBank(dtypes, min_columns, shard)
        self._hooks_all = False
        self._gemms: dict[nn.Module, tuple[Gemm, Gemm]] = {}  # A and B matrices, packed when first needed
        self._last_used: dict[LoraAdapter, int] = {}  # number of the pass; every adapter in the bank is here
        self._num_passes = 0
        self._masked_columns: Tensor | None = None  # bool [parts, 1, columns], to mask; None without adapters
        self.active = False  # whether there are adapters
        self.modules = list(self._modules.values())
        self.operator: Callable[[nn.Module, Tensor, Tensor], Tensor | None] = self._change_in_place

    @property
    def targets(self) -> dict[str, tuple[int, int]]:
        """Input and output sizes of the layers that adapters may change, by name."""
        whole = self._sharding.whole_shapes if self._sharding else {}
        return {name: whole.get(name) or _shape(module) for name, module in self._modules.items()}

    def place(self, adapters: Collection[LoraAdapter | None]) -> list[int]:
        """Add new adapters to the bank; returns the first column of each adapter, or nothing if all are None."""
        if self._masked_columns is None:  # nested: the outer pass has all of these
            self._update_bank({adapter for adapter in adapters if adapter is not None})
        return self.columns(adapters)

    def columns(self, adapters: Collection[LoraAdapter | None]) -> list[int]:
        """The first column of each adapter, all of which the last `place` had; nothing if all are None."""
        return self._bank.first_columns(adapters) if any(adapters) else []

    def placed(self, first_columns: Tensor) -> PlacedAdapters | None:
        """The adapters of a pass from the result of `place` on the device."""
        return PlacedAdapters(first_columns, self._bank.version) if len(first_columns) else None

    @contextmanager
    def applied(self, adapters: Collection[LoraAdapter | None]) -> Iterator[None]:
        """Apply adapters inside the block, where inputs of layers have one part, a row or a token, for each."""
        with self.using(self.placed(to_device(self.place(adapters), torch.int64, self._bank.device))):
            yield

    @contextmanager
    def using(self, placed: PlacedAdapters | None) -> Iterator[None]:
        """Apply adapters that are in the bank already, inside the block."""
        outer = self._masked_columns
        self._masked_columns = None if placed is None else self._bank.masked_columns(placed.first_columns)
        self.active = placed is not None
        try:
            yield
        finally:
            self._masked_columns, self.active = outer, outer is not None

    def use_operator(self, operator: Callable[[nn.Module, Tensor, Tensor], Tensor] | None) -> None:
        """Hook every layer, since compiled graphs keep the hooks that they find: in passes with adapters `operator`
        returns the new output for a layer, its input and its output. None: hook only layers that adapters change.
        """
        self._hooks_all, self.operator = operator is not None, operator or self._change_in_place
        self._update_hooks()

    def changed_output(self, layer: int, x: Tensor, output: Tensor) -> Tensor:
        """A new tensor with the changed output of the layer at an index of `modules`."""
        delta = self._delta(self.modules[layer], x)
        return output.clone(memory_format=torch.contiguous_format) if delta is None else (output + delta).contiguous()

    def clear(self) -> None:
        """Forget all adapters."""
        self._last_used, self._gemms = {}, {}
        self._bank.clear()
        self._update_hooks()

    def _update_bank(self, used: set[LoraAdapter]) -> None:
        self._num_passes += 1
        self._last_used |= dict.fromkeys(used, self._num_passes)
        new = used - self._bank.adapters
        leaving = self._leaving(sum(adapter.rank for adapter in self._last_used) - MAX_ADAPTER_RANKS if new else 0)
        for adapter in leaving:
            del self._last_used[adapter]
        if new or leaving:
            self._gemms = {}  # they hold buffers that a larger bank replaces
            try:
                self._bank.update(new, leaving & self._bank.adapters)
            finally:
                self._update_hooks()
        if used and not self._gemms:  # not in the pass, which may be recorded
            self._gemms = {
                self._modules[name]: (_gemm(down, self._kernels), _gemm(up.T, self._kernels))
                for name, (down, up) in self._bank.layers.items()
            }

    def _leaving(self, missing_ranks: int) -> set[LoraAdapter]:
        """Adapters that have been idle for long, and the least recently used of the others until there are enough
        ranks. The batcher admits sequences only if the ranks of all running adapters fit, so that those of the last
        passes stay: the idle ones, which were used before them, are enough.
        """
        leaving = set()
        for adapter in sorted(self._last_used, key=lambda adapter: (self._last_used[adapter], adapter.version)):
            idle_passes = self._num_passes - self._last_used[adapter]
            if idle_passes == 0 or (idle_passes <= _IDLE_PASSES and missing_ranks <= 0):
                break
            leaving.add(adapter)
            missing_ranks -= adapter.rank
        return leaving

    def _update_hooks(self) -> None:
        """Hook only layers that some adapter changes, since hooks cost time."""
        names = self._modules.keys() if self._hooks_all else self._bank.layers.keys()
        for name in self._hooks.keys() - names:
            self._hooks.pop(name).remove()
        for name in names - self._hooks.keys():
            layer = self._modules[name]
            self._hooks[name] = layer.register_forward_hook(self._hook, prepend=True)  # before ranks add outputs up

    def _hook(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        return self.operator(module, inputs[0], output) if self.active else None

    def _change_in_place(self, module: nn.Module, x: Tensor, output: Tensor) -> None:
        delta = self._delta(module, x)
        if delta is not None:
            output.add_(delta)

    def _delta(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """The sum [..., out] that adapters add to a layer's output for `x` [..., in], whose parts are consecutive."""
        gemms = self._gemms.get(module)
        if gemms is None or not x.numel():
            return None
        down, up = gemms
        masked = self._masked_columns
        assert masked is not None
        hidden = down(x, None)  # [..., columns]
        hidden.view(len(masked), -1, hidden.shape[-1]).masked_fill_(masked, 0.0)
        return up(hidden, None)


def _gemm(weight: Tensor, kernels: CpuKernels | None) -> Gemm:
    """A GEMM with our kernel if possible: for small weights oneDNN's overhead is as large as the product."""
    ours = our_gemms(weight, kernels, weight.dtype).values()
    return next((make(weight) for make in ours), lambda x, bias: linear(x, weight, bias))


_UNCHANGED = {"experts", "dt_proj"}


def _lora_targets(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The linear layers that adapters may change: not the head, nor experts, which reorder tokens, nor Mamba's dt_proj,
    which models multiply by without calling it.
    """
    head = model.get_output_embeddings()
    inside = "."  # path of the last target, whose parts are skipped, such as weights that a slice shares
    for name, module in model.named_modules():
        is_linear = isinstance(module, Conv1D) or hasattr(module, "in_features")
        if is_linear and module is not head and _UNCHANGED.isdisjoint(name.split(".")) and not name.startswith(inside):
            inside = f"{name}."
            yield name, module


def _shape(module: Any) -> tuple[int, int]:
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
