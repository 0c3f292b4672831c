"""The padded KV cache of a running batch, without a copy per step.

Sequences are right-aligned: the newest tokens of all are in the same column. This is a left-padded batch, the one
layout that every decoder-only model of transformers masks correctly. Buffers are wider than the sequences; each step
writes one column further right, and only at the edge are the sequences moved back.

    column   0 ........ end-width ........... end ....... columns
    slot 0   . . . . . . . k k k k k k k k k | (next) . . .
    slot 1   . . . . . . . 0 0 0 k k k k k k | (next) . . .
    slot 2   . . . . . . . 0 k k k k k k k k | (next) . . .

The columns to the left of a sequence are finite but meaningless, and hidden by the attention mask.
"""

import math
import mmap
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from tgis.engines.memory.capacity import KVCacheCost

_SPARE = 4  # slots and columns are over-allocated by a quarter
_COLUMN_STEP = 64


@dataclass(slots=True)
class CacheView:
    """The part of the buffers that the current pass writes and reads, the same in all layers."""

    slots: int = 0  # allocated
    columns: int = 0  # allocated
    rows: slice = field(default_factory=lambda: slice(0, 0))
    read_start: int = 0
    write_start: int = 0
    write_end: int = 0  # also the end of what is read


class PaddedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The buffers of keys and values of one layer for all slots; `keys` and `values` are the viewed part of them."""

    is_sliding = False

    def __init__(self, cache_view: CacheView) -> None:
        super().__init__()
        self.cache_view = cache_view
        self.buffers: list[Tensor] = []  # keys and values, [slots, heads, columns, head size]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate with the head count, head size and dtype of the model."""
        self.buffers = [self._allocate(key_states), self._allocate(value_states)]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new states and return all viewed ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        w = self.cache_view
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[w.rows, :, w.write_start : w.write_end] = states
        self.refresh()
        return self.keys, self.values

    def refresh(self) -> None:
        """Set `keys` and `values` to the view."""
        w = self.cache_view
        self.keys, self.values = (buffer[w.rows, :, w.read_start : w.write_end] for buffer in self.buffers)

    def get_seq_length(self) -> int:
        """Number of columns before those of the pass."""
        return self.cache_view.write_start - self.cache_view.read_start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width and offset of the mask."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """The maximum length; -1 means that there is none."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    @property
    def bytes_per_token(self) -> int:
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in self.buffers)

    def reallocate(self, rows: slice, source: slice, target: slice) -> None:
        """Move the `source` columns of `rows` to the `target` columns of new buffers, which are zero elsewhere."""
        self.keys = self.values = None  # or they would keep the old buffers alive
        for index, old in enumerate(self.buffers):
            self.buffers[index] = self._allocate(old)
            self.buffers[index][rows, :, target] = old[rows, :, source]

    def _allocate(self, like: Tensor) -> Tensor:
        shape = (self.cache_view.slots, like.shape[1], self.cache_view.columns, like.shape[3])
        if not like.is_cpu:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # Separate pages return to the system at once; on the heap, growing buffers leave holes.
        pages = mmap.mmap(-1, math.prod(shape) * like.element_size())
        return torch.frombuffer(pages, dtype=like.dtype).view(shape).zero_()


def padded_cost(layers: list[int], max_slots: int) -> KVCacheCost:
    """The cost of layers with these bytes per token; attention and reallocation may copy a layer twice."""
    bytes_per_token = sum(layers) * (1 + 2 / len(layers))
    return KVCacheCost(bytes_per_token * (1 + 1 / _SPARE) ** 2, int(bytes_per_token * 2 * _COLUMN_STEP * max_slots))


class PaddedKVCache:
    """The KV cache of all layers, and the slot and columns of each sequence. Rows 0 to n-1 are the first slots."""

    def __init__(self, max_slots: int) -> None:
        self._view = CacheView()
        self._max_slots = max_slots
        self._end_column = 0
        self.seq_lens: list[int] = []  # lengths by row
        # The cache that the model gets.
        self.past_key_values = Cache(layer_class_to_replicate=partial(PaddedCacheLayer, self._view))

    @property
    def width(self) -> int:
        """Columns of the longest sequence."""
        return max(self.seq_lens, default=0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's keys and values over all layers; known after the first pass."""
        return sum(layer.bytes_per_token for layer in self.past_key_values.layers)

    @property
    def allocated_bytes(self) -> int:
        return self._view.slots * self._view.columns * self.bytes_per_token

    @property
    def cost(self) -> KVCacheCost:
        """The cost, known after the first pass."""
        return padded_cost([layer.bytes_per_token for layer in self.past_key_values.layers], self._max_slots)

    def append(self, seq_lens: list[int]) -> None:
        """Make room for new sequences of these lengths (tokens about to be computed)."""
        first = len(self.seq_lens)
        self._reserve(first + len(seq_lens), max(self.width, *seq_lens))
        self.seq_lens += seq_lens
        for buffer in self._buffers:  # an earlier sequence may have left NaN
            buffer[first : len(self.seq_lens), :, : self._end_column] = 0

    def view(self, first: int, start: int, stop: int) -> None:
        """View the rows from `first` on to compute columns start..stop of the longest."""
        w, left = self._view, self._end_column - max(self.seq_lens[first:])
        w.rows, w.read_start = slice(first, len(self.seq_lens)), left
        w.write_start, w.write_end = left + start, left + stop

    def view_decode(self) -> None:
        """View all rows to compute one more token for each."""
        self._reserve(len(self.seq_lens), self.width, extra_columns=1)
        self.seq_lens = [length + 1 for length in self.seq_lens]
        self._end_column += 1
        self.view(0, self.width - 1, self.width)

    def read_all(self) -> None:
        """View all rows for reading only."""
        self.view(0, self.width, self.width)
        for layer in self.past_key_values.layers:
            layer.refresh()

    def write(self, first: int, tensors: list[Tensor]) -> None:
        """Fill the rows from `first` on with keys and values [rows, heads, columns, head size], layer by layer."""
        self.view(first, 0, tensors[0].shape[2])
        for layer, (keys, values) in enumerate(zip(tensors[::2], tensors[1::2], strict=True)):
            self.past_key_values.update(keys, values, layer)

    def contiguous(self) -> list[Tensor]:
        """Keys and values [rows, heads, columns, head size], layer by layer; unused slots and columns are dropped."""
        if (self._view.slots, self._view.columns) != (len(self.seq_lens), self.width):
            self._reallocate(len(self.seq_lens), self.width, self.width)
        return self._buffers

    def replace(self, tensors: list[Tensor]) -> None:
        """Take the contiguous keys and values of a pass that has computed one more token for each row."""
        self.seq_lens = [length + 1 for length in self.seq_lens]
        self._view.columns = self._end_column = self.width
        for index, layer in enumerate(self.past_key_values.layers):
            layer.buffers = tensors[2 * index : 2 * index + 2]

    def attention_mask(self, first: int, stop: int) -> Tensor:
        """Which of the leftmost `stop` viewed columns are tokens of the rows from `first` on: bool [rows, stop]."""
        return padding_mask(self.seq_lens[first:], stop)

    def remove(self, row: int) -> None:
        """Free a row; the last one moves there."""
        last = len(self.seq_lens) - 1
        if row != last:
            columns = slice(self._end_column - self.width, self._end_column)
            for buffer in self._buffers:
                buffer[row, :, columns] = buffer[last, :, columns]
            self.seq_lens[row] = self.seq_lens[last]
        self.seq_lens.pop()

    @property
    def _buffers(self) -> list[Tensor]:
        """Keys and values, layer by layer."""
        return [buffer for layer in self.past_key_values.layers for buffer in layer.buffers]

    def _reserve(self, slots: int, width: int, extra_columns: int = 0) -> None:
        """Ensure `slots` rows, `width` columns left of the end and `extra_columns` right of it."""
        w = self._view
        if slots <= w.slots and width <= self._end_column and self._end_column + extra_columns <= w.columns:
            return
        needed = width + extra_columns
        columns = -(-(needed + needed // _SPARE) // _COLUMN_STEP) * _COLUMN_STEP
        self._reallocate(min(self._max_slots, slots + slots // _SPARE), columns, width)

    def _reallocate(self, slots: int, columns: int, end: int) -> None:
        """Move the sequences to buffers of another size, where they end at column `end`."""
        source = slice(self._end_column - self.width, self._end_column)
        self._view.slots, self._view.columns, self._end_column = slots, columns, end
        for layer in self.past_key_values.layers:
            layer.reallocate(slice(0, len(self.seq_lens)), source, slice(end - self.width, end))


def padding_mask(lengths: list[int], columns: int) -> Tensor:
    """Which of the leftmost `columns` of right-aligned rows are tokens: bool [rows, columns]."""
    return torch.arange(columns) >= max(lengths) - torch.tensor(lengths)[:, None]
