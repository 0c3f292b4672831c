"""The matrices of several LoRA adapters side by side, layer by layer, so that one product is with all of them.

An adapter has the same columns in every layer, as many as its largest rank. They are written when it comes, and free
when it goes; nothing is moved but to make room, or to close large gaps.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from tgis.engines.kernels.transfers import to_device
from tgis.prompts.lora import LoraAdapter, LowRank

_FREE, _NOBODY = -1, -2


class LoraStack:
    """Adapters, and the columns of each; those of no adapter hold anything, all of it finite."""

    def __init__(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """`dtypes` of all layers: some of a half-precision model are not."""
        self._dtypes = dtypes
        self._places: dict[LoraAdapter, slice] = {}
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}  # by layer: [capacity, inputs], [capacity, outputs]
        self._capacity = 0
        self._owners = torch.empty(0)
        self.layers: dict[str, tuple[Tensor, Tensor]] = {}  # the same, no wider than they are used

    @property
    def adapters(self) -> AbstractSet[LoraAdapter]:
        """All that are here."""
        return self._places.keys()

    def change(self, come: Iterable[LoraAdapter], go: Iterable[LoraAdapter]) -> None:
        """Let adapters in and out; if that fails, for lack of memory say, none is left."""
        try:
            self._change(come, go)
        except BaseException:
            self._rebuild([])
            raise
        finally:
            self._show()

    def foreign(self, adapters: Iterable[LoraAdapter | None]) -> Tensor:
        """Which columns are not those of each adapter: bool [adapters, 1, columns]."""
        starts = [_NOBODY if adapter is None else self._places[adapter].start for adapter in adapters]
        return to_device(starts, torch.int64, self._owners.device)[:, None, None] != self._owners

    def _change(self, come: Iterable[LoraAdapter], go: Iterable[LoraAdapter]) -> None:
        for adapter in go:
            del self._places[adapter]
        for adapter in come:
            start = self._gap(adapter.rank)
            if start is None:
                self._rebuild([*self._places, adapter])
            else:
                self._put(adapter, start)
        if self._width >= 2 * sum(adapter.rank for adapter in self._places):
            self._rebuild(list(self._places))

    @property
    def _width(self) -> int:
        return max((place.stop for place in self._places.values()), default=0)

    def _gap(self, rank: int) -> int | None:
        """Where so many columns are free, if anywhere."""
        start = 0
        for place in sorted(self._places.values(), key=lambda place: place.start):
            if place.start - start >= rank:
                return start
            start = place.stop
        return start if self._capacity - start >= rank else None

    def _rebuild(self, adapters: list[LoraAdapter]) -> None:
        needed = sum(adapter.rank for adapter in adapters)
        self._capacity = 1 << (needed - 1).bit_length() if needed else 0
        self._places, self._buffers = {}, {}
        for adapter in adapters:
            self._put(adapter, self._width)

    def _put(self, adapter: LoraAdapter, start: int) -> None:
        place = self._places[adapter] = slice(start, start + adapter.rank)
        for name in adapter.layers.keys() - self._buffers.keys():
            self._buffers[name] = self._empty(adapter.layers[name], self._dtypes[name])
        for name, (down, up) in self._buffers.items():
            layer = adapter.layers.get(name)
            end = start if layer is None else start + len(layer.down)
            if layer is not None:
                down[start:end] = layer.down
                up[start:end] = layer.up
            down[end : place.stop] = 0.0  # and what it is multiplied with next does not matter

    def _empty(self, like: LowRank, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shapes = (self._capacity, like.down.shape[1]), (self._capacity, like.up.shape[1])
        down, up = (torch.zeros(shape, dtype=dtype, device=like.down.device) for shape in shapes)
        return down, up

    def _show(self) -> None:
        width = self._width
        owners = [_FREE] * width
        for place in self._places.values():
            owners[place] = [place.start] * (place.stop - place.start)
        self.layers = {name: (down[:width], up[:width]) for name, (down, up) in self._buffers.items()}
        device = next(iter(self.layers.values()))[0].device if self.layers else None
        self._owners = torch.tensor(owners, dtype=torch.int64, device=device)
