"""PT2_COMPILE: torch.compile for what stands between the products and the attention of a decoder, in one graph.

Attention is an operator of its own in it, since a paged cache is nothing that a compiler knows. Whatever would need
another graph than those made at the start runs as it is: no request waits for a compiler.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.fused_ops import RmsNorm
from tgis.engines.kernels.cpu.linear import PackedLinear
from tgis.engines.paged.attention import PagedAttention

_ATTEND = "attend(Tensor q, Tensor k, Tensor v, int layer, float? scale, int? window, float? cap, Tensor? s) -> Tensor"


def can_compile(model: PreTrainedModel) -> bool:
    """Not where operators have been replaced by kernels of the CPU, which leave a compiler nothing to gain."""
    return not any(isinstance(module, (PackedLinear, RmsNorm)) for module in model.modules())


class CompiledDecoder:
    """The forward of one engine's model, compiled between `start` and `finish`; as it was before, and if undone."""

    def __init__(self, model: PreTrainedModel, attention: PagedAttention) -> None:
        self._decoder = model.base_model
        self._attention = attention
        self._eager_forward = self._decoder.forward
        self._library = torch.library.Library(attention.name, "DEF")  # its operators live as long as it does
        self._define(_ATTEND, self._attend, lambda q, _k, v, *_: q.new_empty(1, q.shape[2], q.shape[1], v.shape[3]))
        self._stance = "force_eager"

    def enable(self) -> None:
        """Compile a graph for whatever comes that has none."""
        self._attention.operator = getattr(torch.ops, self._attention.name).attend
        self._decoder.forward = torch.compile(self._eager_forward, dynamic=True)
        self._stance = "default"

    def freeze(self) -> None:
        """Compile nothing more."""
        self._stance = "eager_on_recompile"

    def disable(self) -> None:
        """Compute as before `start`."""
        self._attention.operator = self._attention.attend
        self._decoder.forward = self._eager_forward
        self._stance = "force_eager"

    def stance(self, *, eager: bool) -> AbstractContextManager[None]:
        """A block with passes that use what is compiled, unless they must be plain: those of changed layers."""
        block: AbstractContextManager[None] = torch.compiler.set_stance("force_eager" if eager else self._stance)
        return block

    def _define(self, schema: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
        name = schema.partition("(")[0]
        self._library.define(schema)
        self._library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self._attention.name}::{name}", shape, lib=self._library)

    def _attend(self, *arguments: Any) -> Tensor:
        return self._attention.attend(*arguments).contiguous()
