"""A stand-in for CUDA graph capture on machines without a GPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tgis.engines.paged import compile as compiling
from tgis.engines.paged.cuda_graphs import Replay

_COLLECTIVES = "c10d"  # namespace of operators that change tensors, which their schemas do not say


def record(run: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """As a CUDA graph does: a replay runs no Python, reads and writes the same tensors, and repeats every operator."""
    tape = _Tape()
    with tape:
        output = run()
    return tape.replay, output


class _Tape(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def replay(self) -> None:
        for operator, args, kwargs, outputs in self._calls:
            results = _tensors(_run(operator, args, kwargs))
            for output, result in zip(outputs, results, strict=True) if outputs else ():
                output.copy_(result)

    def __torch_dispatch__(
        self, operator: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if operator.namespace == compiling._NAMESPACE:  # of which the kernels are captured
            with self:
                return getattr(compiling, f"_{operator._schema.name.split('::')[1]}")(*args, **kwargs)
        found = _run(operator, args, kwargs)
        memory = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        is_view = all(each.untyped_storage().data_ptr() in memory for each in _tensors(found))
        in_place = operator._schema.is_mutable or operator.namespace == _COLLECTIVES
        if in_place or not is_view:
            self._calls.append((operator, args, kwargs, [] if in_place else _tensors(found)))
        return found


def _run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = operator(*args, **kwargs)
    if operator.namespace == _COLLECTIVES:
        found[-1].wait()
    return found


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]
