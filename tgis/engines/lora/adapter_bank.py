"""The matrices of several LoRA adapters side by side, layer by layer, so that one GEMM covers all of them.

An adapter has the same columns in every layer, as many as its largest rank, or one more: kernels for bfloat16 multiply
pairs of columns, and the order of sums must not depend on an adapter's place. They are written when it is added and
freed when it is removed; the other adapters move only to make room or to close large gaps. A bank with a minimum of
columns always uses its full capacity, at the same addresses until it has to grow or another layer is adapted, so that
captured steps read later adapters.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from tgis.engines.host_memory import to_device
from tgis.prompts.lora import LoraAdapter

ShardFactors = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
_FREE, _NO_ADAPTER = -1, -2


def _num_columns(adapters: Iterable[LoraAdapter]) -> int:
    return sum(adapter.rank + adapter.rank % 2 for adapter in adapters)


class AdapterBank:
    """Adapters and their columns; free columns hold arbitrary finite values."""

    def __init__(
        self, dtypes: Mapping[str, torch.dtype], min_columns: int = 0, shard: ShardFactors | None = None
    ) -> None:
        """`dtypes` are those of the layers, which may differ in a half-precision model. `shard` takes
        the rank's part of the matrices of a layer.
        """
        self._shard = shard or (lambda _name, down, up: (down, up))
        self._dtypes = dtypes
        self._min_columns = min_columns
        self._columns: dict[LoraAdapter, slice] = {}
        # Buffers by layer: [capacity, inputs], [capacity, outputs].
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        self._capacity = 0
        self._column_owners = torch.empty(0)
        self._addresses_changed = False  # since the last update
        self.layers: dict[str, tuple[Tensor, Tensor]] = {}  # the used part of the buffers
        self.version = 0  # changes with the addresses in `layers` and, without a minimum of columns, with the contents

    @property
    def adapters(self) -> AbstractSet[LoraAdapter]:
        return self._columns.keys()

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self._column_owners.device

    def update(self, added: Iterable[LoraAdapter], removed: Iterable[LoraAdapter]) -> None:
        """Add and remove adapters; if that raises, for example for lack of memory, the bank is empty afterwards."""
        try:
            for adapter in removed:
                del self._columns[adapter]
            for adapter in added:
                start = self._find_gap(_num_columns([adapter]))
                if start is None:
                    self._rebuild([*self._columns, adapter])
                else:
                    self._write(adapter, start)
            is_wide = self._width >= 2 * _num_columns(self._columns)
            if is_wide and self._capacity > self._min_columns:
                self._rebuild(list(self._columns))
        except BaseException:
            self._rebuild([])
            raise
        finally:
            self._rebuild_views()

    def clear(self) -> None:
        """Remove all adapters and free their memory."""
        self._rebuild([])
        self._rebuild_views()

    def first_columns(self, adapters: Iterable[LoraAdapter | None]) -> list[int]:
        """The first column of each adapter."""
        return [_NO_ADAPTER if adapter is None else self._columns[adapter].start for adapter in adapters]

    def masked_columns(self, first_columns: Tensor) -> Tensor:
        """The columns that do not belong to the adapters at `first_columns` [n]: bool [n, 1, columns]."""
        return first_columns[:, None, None] != self._column_owners

    @property
    def _width(self) -> int:
        return max((columns.stop for columns in self._columns.values()), default=0)

    def _find_gap(self, count: int) -> int | None:
        """The first of `count` adjacent free columns; None if there are none."""
        start = 0
        for columns in sorted(self._columns.values(), key=lambda columns: columns.start):
            if columns.start - start >= count:
                return start
            start = columns.stop
        return start if self._capacity - start >= count else None

    def _rebuild(self, adapters: list[LoraAdapter]) -> None:
        needed = _num_columns(adapters)
        capacity = max(1 << (needed - 1).bit_length() if needed else 0, self._min_columns)
        if capacity != self._capacity or not adapters:
            self._buffers, self.layers = {}, {}  # their memory is free for the new buffers
            self._capacity, self._addresses_changed = capacity, True
        self._columns = {}
        for adapter in adapters:
            self._write(adapter, self._width)

    def _write(self, adapter: LoraAdapter, start: int) -> None:
        columns = self._columns[adapter] = slice(start, start + _num_columns([adapter]))
        parts = {name: self._shard(name, layer.lora_a, layer.lora_b) for name, layer in adapter.layers.items()}
        for name in parts.keys() - self._buffers.keys():
            self._addresses_changed = True
            self._buffers[name] = self._empty(self._dtypes[name], *parts[name])
        for name, (down, up) in self._buffers.items():
            end = start
            if name in parts:
                end += len(parts[name][0])
                down[start:end], up[start:end] = parts[name]
            down[end : columns.stop] = 0.0  # so that these columns of `up` add nothing

    def _empty(self, dtype: torch.dtype, *like: Tensor) -> tuple[Tensor, Tensor]:
        down, up = (torch.zeros(self._capacity, x.shape[1], dtype=dtype, device=x.device) for x in like)
        return down, up

    def _rebuild_views(self) -> None:
        width = self._capacity if self._min_columns else self._width
        owners = [_FREE] * width
        for columns in self._columns.values():
            owners[columns] = [columns.start] * (columns.stop - columns.start)
        if self._min_columns and not self._addresses_changed:
            self._column_owners.copy_(to_device(owners, torch.int64, self.device))
            return
        self._addresses_changed = False
        self.version += 1
        self.layers = {name: (down[:width], up[:width]) for name, (down, up) in self._buffers.items()}
        device = next(iter(self.layers.values()))[0].device if self.layers else None
        self._column_owners = torch.tensor(owners, dtype=torch.int64, device=device)
