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

_SPARE = 4  # one slot for so many, and one column for as many, is allocated in advance
_COLUMN_STEP = 64


@dataclass(frozen=True, slots=True)
class KvCost:
    """What a cache takes at most, in bytes: so many for each token of the batch, padding included, and some besides."""

    token: float
    fixed: int

    def __add__(self, other: "KvCost") -> "KvCost":
        return KvCost(self.token + other.token, self.fixed + other.fixed)


@dataclass(slots=True)
class Window:
    """The part of the buffers that the current forward pass writes and reads; shared by all layers."""

    slots: int = 0  # allocated rows
    columns: int = 0  # allocated columns
    rows: slice = field(default_factory=lambda: slice(0, 0))
    read_from: int = 0
    write_from: int = 0
    write_to: int = 0  # also the end of what is read


class PaddedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: buffers for all slots, and in `keys` and `values` what the window shows of them."""

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate with the head count, head size and dtype that the model turns out to have."""
        self.key_buffer = self._buffer(key_states)  # [slots, heads, columns, head size]
        self.value_buffer = self._buffer(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states at the window and return all that the window shows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        w = self.window
        self.key_buffer[w.rows, :, w.write_from : w.write_to] = key_states
        self.value_buffer[w.rows, :, w.write_from : w.write_to] = value_states
        self.look()
        return self.keys, self.values

    def look(self) -> None:
        """Let `keys` and `values` be what the window shows now."""
        w = self.window
        self.keys = self.key_buffer[w.rows, :, w.read_from : w.write_to]
        self.values = self.value_buffer[w.rows, :, w.read_from : w.write_to]

    def get_seq_length(self) -> int:
        """Columns that the query tokens of the pass have before them."""
        return self.window.write_from - self.window.read_from

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

    def move(self, rows: slice, source: slice, target: slice) -> None:
        """Move `rows` into freshly allocated buffers of the window's size; everything else becomes zero."""
        if self.is_initialized:
            self.keys = self.values = None  # they would keep the old buffers
            self.key_buffer = self._moved(self.key_buffer, rows, source, target)
            self.value_buffer = self._moved(self.value_buffer, rows, source, target)

    def copy_row(self, source: int, target: int, columns: slice) -> None:
        """Let one slot take over another's columns."""
        if self.is_initialized:
            self.key_buffer[target, :, columns] = self.key_buffer[source, :, columns]
            self.value_buffer[target, :, columns] = self.value_buffer[source, :, columns]

    def clear(self, rows: slice, columns: slice) -> None:
        """Zero a region, so that what an earlier row left there (NaN, say) can harm nobody."""
        if self.is_initialized:
            self.key_buffer[rows, :, columns] = 0
            self.value_buffer[rows, :, columns] = 0

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.window.slots, like.shape[1], self.window.columns, like.shape[3])
        if not like.is_cpu:
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # Pages of its own, which the system has back at once: on the heap, buffers that grow leave holes.
        pages = mmap.mmap(-1, math.prod(shape) * like.element_size())
        return torch.frombuffer(pages, dtype=like.dtype).view(shape).zero_()

    def _moved(self, old: torch.Tensor, rows: slice, source: slice, target: slice) -> torch.Tensor:
        new = self._buffer(old)
        new[rows, :, target] = old[rows, :, source]
        return new


class PaddedCache:
    """Which slot and which columns each row has. Rows are numbered 0..n-1 without gaps, in slot order."""

    def __init__(self, max_slots: int) -> None:
        self._window = Window()
        self._max_slots = max_slots
        self._end = 0
        self.lengths: list[int] = []  # computed tokens of each row
        self.states = Cache(layer_class_to_replicate=partial(PaddedLayer, self._window))  # for the model

    @property
    def width(self) -> int:
        """Columns of the longest row."""
        return max(self.lengths, default=0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values for one token of one row, over all layers; known after the first pass."""
        return sum(layer.bytes_per_token for layer in self.states.layers)

    @property
    def held_bytes(self) -> int:
        """Of all buffers."""
        return self._window.slots * self._window.columns * self.bytes_per_token

    @property
    def cost(self) -> KvCost:
        """What buffers can come to; known after the first pass. One of a layer exists twice while it is moved."""
        each = self.bytes_per_token * (1 + 1 / (2 * len(self.states.layers)))
        return KvCost(each * (1 + 1 / _SPARE) ** 2, int(each * 2 * _COLUMN_STEP * self._max_slots))

    def join(self, lengths: list[int]) -> None:
        """Make room for new rows of these lengths (tokens about to be computed), behind the present ones."""
        first = len(self.lengths)
        self._reserve(first + len(lengths), max(self.width, *lengths))
        self.lengths += lengths
        for layer in self.states.layers:
            layer.clear(slice(first, len(self.lengths)), slice(0, self._end))

    def prefill(self, first: int, start: int, stop: int) -> int:
        """Show the rows from `first` on, about to compute columns start..stop of their widest; its width."""
        width = max(self.lengths[first:])
        left = self._end - width
        self._show(slice(first, len(self.lengths)), left, left + start, left + stop)
        return width

    def decode(self) -> None:
        """Show every row, about to compute one more token each."""
        self._reserve(len(self.lengths), self.width, room=1)
        self.lengths = [length + 1 for length in self.lengths]
        self._end += 1
        self._show(slice(0, len(self.lengths)), self._end - self.width, self._end - 1, self._end)

    def show(self) -> None:
        """Show every row as it is; nothing is to be computed."""
        self._show(slice(0, len(self.lengths)), self._end - self.width, self._end, self._end)
        for layer in self.states.layers:
            layer.look()

    def mask(self, first: int, stop: int) -> torch.Tensor:
        """Which of the leftmost `stop` columns shown are tokens of their row: bool [rows, stop]."""
        lengths = torch.tensor(self.lengths[first:])
        return torch.arange(stop) >= (int(lengths.max()) - lengths)[:, None]

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            columns = slice(self._end - self.width, self._end)
            for layer in self.states.layers:
                layer.copy_row(last, row, columns)
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        if not self.lengths:
            self._end = 0

    def _show(self, rows: slice, read_from: int, write_from: int, write_to: int) -> None:
        w = self._window
        w.rows, w.read_from, w.write_from, w.write_to = rows, read_from, write_from, write_to

    def _reserve(self, slots: int, width: int, room: int = 0) -> None:
        """Ensure `slots` rows, `width` columns left of the end and `room` right of it."""
        w = self._window
        if slots <= w.slots and width <= self._end and self._end + room <= w.columns:
            return
        source = slice(self._end - self.width, self._end)
        w.slots = min(self._max_slots, slots + slots // _SPARE)
        needed = width + room
        w.columns = -(-(needed + needed // _SPARE) // _COLUMN_STEP) * _COLUMN_STEP
        self._end = width
        for layer in self.states.layers:
            layer.move(slice(0, len(self.lengths)), source, slice(width - self.width, width))
