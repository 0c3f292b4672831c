"""The padded KV cache: keys and values of every row of a running batch, without a copy per step.

Rows are right-aligned: all newest tokens stand in the same column, as in a left-padded batch, which is the one
layout that every decoder-only model of transformers masks correctly. A buffer is wider than its rows; each step
writes one column further right, and only when the buffer's edge is reached are the rows moved back.

    column   0 ........ end-width ........... end ....... columns
    slot 0   . . . . . . . k k k k k k k k k | (next) . . .
    slot 1   . . . . . . . 0 0 0 k k k k k k | (next) . . .
    slot 2   . . . . . . . 0 k k k k k k k k | (next) . . .

What stands left of a row is finite but meaningless: the attention mask hides it. Owns no token and no request.
"""

import math
import mmap
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from tgis.engines.memory.profiler import KvCacheCost

_SPARE = 4  # over-allocate slots and columns by one in so many
_COLUMN_STEP = 64


@dataclass(slots=True)
class CacheView:
    """The part of the buffers that the current forward pass writes and reads; shared by all layers."""

    slots: int = 0  # allocated rows
    columns: int = 0  # allocated columns
    rows: slice = field(default_factory=lambda: slice(0, 0))
    read_start: int = 0
    write_start: int = 0
    write_end: int = 0  # also the end of what is read


class PaddedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: buffers for all slots, and in `keys` and `values` what the window shows of them."""

    is_sliding = False

    def __init__(self, cache_view: CacheView) -> None:
        super().__init__()
        self.cache_view = cache_view

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate with the head count, head size and dtype that the model turns out to have."""
        self.key_buffer = self._allocate(key_states)  # [slots, heads, columns, head size]
        self.value_buffer = self._allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states at the window and return all that the window shows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        w = self.cache_view
        self.key_buffer[w.rows, :, w.write_start : w.write_end] = key_states
        self.value_buffer[w.rows, :, w.write_start : w.write_end] = value_states
        self.refresh()
        return self.keys, self.values

    def refresh(self) -> None:
        """Let `keys` and `values` be what the window shows now."""
        w = self.cache_view
        self.keys = self.key_buffer[w.rows, :, w.read_start : w.write_end]
        self.values = self.value_buffer[w.rows, :, w.read_start : w.write_end]

    def get_seq_length(self) -> int:
        """Columns that the query tokens of the pass have before them."""
        return self.cache_view.write_start - self.cache_view.read_start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask, and the first one's position."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No bound of its own."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        buffers = (self.key_buffer, self.value_buffer) if self.is_initialized else ()
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)

    def reallocate(self, rows: slice, source: slice, target: slice) -> None:
        """Move `rows` into freshly allocated buffers of the window's size; everything else becomes zero."""
        if self.is_initialized:
            self.keys = self.values = None  # they would keep the old buffers
            self.key_buffer = self._reallocated(self.key_buffer, rows, source, target)
            self.value_buffer = self._reallocated(self.value_buffer, rows, source, target)

    def copy_row(self, source: int, target: int, columns: slice) -> None:
        """Let one slot take over another's columns."""
        if self.is_initialized:
            self.key_buffer[target, :, columns] = self.key_buffer[source, :, columns]
            self.value_buffer[target, :, columns] = self.value_buffer[source, :, columns]

    def zero(self, rows: slice, columns: slice) -> None:
        """Zero a region, so that what an earlier row left there (NaN, say) can harm nobody."""
        if self.is_initialized:
            self.key_buffer[rows, :, columns] = 0
            self.value_buffer[rows, :, columns] = 0

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.cache_view.slots, like.shape[1], self.cache_view.columns, like.shape[3])
        if not like.is_cpu:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # Pages of its own, which the system has back at once: on the heap, buffers that grow leave holes.
        pages = mmap.mmap(-1, math.prod(shape) * like.element_size())
        return torch.frombuffer(pages, dtype=like.dtype).view(shape).zero_()

    def _reallocated(self, old: torch.Tensor, rows: slice, source: slice, target: slice) -> torch.Tensor:
        new = self._allocate(old)
        new[rows, :, target] = old[rows, :, source]
        return new


class PaddedCache:
    """Which slot and which columns each row has. Rows are numbered 0..n-1 without gaps, in slot order."""

    def __init__(self, max_slots: int) -> None:
        self._view = CacheView()
        self._max_slots = max_slots
        self._end_column = 0
        self.seq_lens: list[int] = []  # computed tokens of each row
        self.past_key_values = Cache(layer_class_to_replicate=partial(PaddedCacheLayer, self._view))  # for the model

    @property
    def width(self) -> int:
        """Columns of the longest row."""
        return max(self.seq_lens, default=0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values for one token of one row, over all layers; known after the first pass."""
        return sum(layer.bytes_per_token for layer in self.past_key_values.layers)

    @property
    def allocated_bytes(self) -> int:
        """Of all buffers."""
        return self._view.slots * self._view.columns * self.bytes_per_token

    @property
    def cost(self) -> KvCacheCost:
        """Known after the first pass; attention and reallocation may copy one layer's keys and values twice."""
        each = self.bytes_per_token * (1 + 2 / len(self.past_key_values.layers))
        return KvCacheCost(each * (1 + 1 / _SPARE) ** 2, int(each * 2 * _COLUMN_STEP * self._max_slots))

    def append(self, seq_lens: list[int]) -> None:
        """Make room for new rows of these lengths (tokens about to be computed), behind the present ones."""
        first = len(self.seq_lens)
        self._reserve(first + len(seq_lens), max(self.width, *seq_lens))
        self.seq_lens += seq_lens
        for layer in self.past_key_values.layers:
            layer.zero(slice(first, len(self.seq_lens)), slice(0, self._end_column))

    def view_prefill(self, first: int, start: int, stop: int) -> int:
        """Show the rows from `first` on, about to compute columns start..stop of their widest; its width."""
        width = max(self.seq_lens[first:])
        left = self._end_column - width
        self._set_view(slice(first, len(self.seq_lens)), left, left + start, left + stop)
        return width

    def view_decode(self) -> None:
        """Show every row, about to compute one more token each."""
        self._reserve(len(self.seq_lens), self.width, extra_columns=1)
        self.seq_lens = [length + 1 for length in self.seq_lens]
        self._end_column += 1
        self._set_view(
            slice(0, len(self.seq_lens)), self._end_column - self.width, self._end_column - 1, self._end_column
        )

    def view_all(self) -> None:
        """Show every row as it is; nothing is to be computed."""
        self._set_view(slice(0, len(self.seq_lens)), self._end_column - self.width, self._end_column, self._end_column)
        for layer in self.past_key_values.layers:
            layer.refresh()

    def attention_mask(self, first: int, stop: int) -> torch.Tensor:
        """Which of the leftmost `stop` columns shown are tokens of their row: bool [rows, stop]."""
        lengths = torch.tensor(self.seq_lens[first:])
        return torch.arange(stop) >= (int(lengths.max()) - lengths)[:, None]

    def remove(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        last = len(self.seq_lens) - 1
        if row != last:
            columns = slice(self._end_column - self.width, self._end_column)
            for layer in self.past_key_values.layers:
                layer.copy_row(last, row, columns)
            self.seq_lens[row] = self.seq_lens[last]
        self.seq_lens.pop()
        if not self.seq_lens:
            self._end_column = 0

    def _set_view(self, rows: slice, read_from: int, write_from: int, write_to: int) -> None:
        w = self._view
        w.rows, w.read_start, w.write_start, w.write_end = rows, read_from, write_from, write_to

    def _reserve(self, slots: int, width: int, extra_columns: int = 0) -> None:
        """Ensure `slots` rows, `width` columns left of the end and `room` right of it."""
        w = self._view
        if slots <= w.slots and width <= self._end_column and self._end_column + extra_columns <= w.columns:
            return
        source = slice(self._end_column - self.width, self._end_column)
        w.slots = min(self._max_slots, slots + slots // _SPARE)
        needed = width + extra_columns
        w.columns = -(-(needed + needed // _SPARE) // _COLUMN_STEP) * _COLUMN_STEP
        self._end_column = width
        for layer in self.past_key_values.layers:
            layer.reallocate(slice(0, len(self.seq_lens)), source, slice(width - self.width, width))
