"""PT2_COMPILE: torch.compile of a decoder in one graph, with its linear layers and attention as they are.

Attention is a custom operator in that graph, since no compiler knows a paged cache. Steps that would need a graph
beyond those made at startup run eagerly: no request waits for a compiler.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgis.engines.paged.attention import PagedAttention

_ATTEND = "attend(Tensor q, Tensor k, Tensor v, int layer, float? scale, int? window, float? cap, Tensor? s) -> Tensor"


def can_compile(model: PreTrainedModel) -> bool:
    """Not where CPU kernels have replaced operators, which leaves a compiler nothing to gain."""
    return not any(getattr(module, "runs_cpu_kernel", False) for module in model.modules())


class CompiledDecoder:
    """The forward of one engine's model: compiles what comes between `enable` and `freeze`, later only runs it."""

    def __init__(self, model: PreTrainedModel, attention: PagedAttention) -> None:
        self._decoder = model.base_model
        self._attention = attention
        self._eager_forward = self._decoder.forward
        self._library = torch.library.Library(attention.name, "DEF")  # its operators live as long as it does
        self._define(_ATTEND, self._attend, lambda q, _k, v, *_: q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]))
        self._stance = "force_eager"

    def enable(self) -> None:
        """Compile a graph for every step that has none."""
        self._attention.operator = getattr(torch.ops, self._attention.name).attend
        self._decoder.forward = torch.compile(self._eager_forward, dynamic=True)
        self._stance = "default"

    def freeze(self) -> None:
        """Compile nothing more."""
        self._stance = "eager_on_recompile"

    def disable(self) -> None:
        """Run eagerly, as before `enable`."""
        self._attention.operator = self._attention.attend
        self._decoder.forward = self._eager_forward
        self._stance = "force_eager"

    def stance(self, *, eager: bool) -> AbstractContextManager[None]:
        """A block of compiled steps; eager ones are for changed layers."""
        block: AbstractContextManager[None] = torch.compiler.set_stance("force_eager" if eager else self._stance)
        return block

    def _define(self, schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> None:
        name = schema.partition("(")[0]
        self._library.define(schema)
        self._library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self._attention.name}::{name}", fake, lib=self._library)

    def _attend(self, *arguments: Any) -> Tensor:
        return self._attention.attend(*arguments).contiguous()
