"""The tokens so far of the sequences whose penalties depend on them, on the device."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from tgis.batcher.sequence import Sequence
from tgis.engines.host_memory import upload

_SPARE_COLUMNS = 128  # columns reserved for tokens to come


@dataclass(slots=True)
class _Slot:
    """A row of the tensor, and how many tokens it has."""

    index: int
    length: int = 0
    num_generated: int = 0  # tokens of the output, which come last


class HistorySlots:
    """Histories that stay on the device from step to step, in the rows of one tensor.

    A sequence that joins takes a slot and writes all its tokens, later the new ones only. It keeps the slot until it is
    released or another sequence needs it, the least recently used first. Slot 0 is a scratch row for sequences without
    a history.
    """

    def __init__(self, device: torch.device) -> None:
        self._slots: dict[int, _Slot] = {}  # slots by request id, the least recently used first
        self._free: list[int] = []
        self.ids = torch.zeros(1, 1, dtype=torch.int32, device=device)

    def update(
        self, seqs: list[Sequence], history_of: Callable[[Sequence], list[int]], lookahead: int
    ) -> tuple[list[int], list[int]]:
        """Write what the slots of these sequences lack; returns the slots and the lengths of the histories.

        `history_of` returns all tokens of a history, those of the output last. The lengths include the newest
        `lookahead` tokens, at most one, which `append` writes.
        """
        if any(seq.id not in self._slots for seq in seqs):
            self._take_slots([seq.id for seq in seqs])
        writes = []
        for seq in seqs:
            slot = self._slots[seq.id] = self._slots.pop(seq.id)
            added = seq.num_generated_tokens - slot.num_generated  # negative after a step that failed
            tokens = seq.tokens[len(seq.tokens) - max(added, 0) :] if slot.length else history_of(seq)
            start = slot.length + min(added, 0) if slot.length else 0
            writes.append((slot.index, start, tokens))
            slot.length, slot.num_generated = start + len(tokens) + lookahead, seq.num_generated_tokens + lookahead
        slots = [self._slots[seq.id] for seq in seqs]
        self._reserve(len(self.ids), max(slot.length for slot in slots))
        self._write([write for write in writes if write[2]])
        return [slot.index for slot in slots], [slot.length for slot in slots]

    def append(self, rows: Tensor, newest: Tensor) -> None:
        """Write the last token of each history [B]; `rows` are those of `Histories`."""
        slots, _, ends = rows
        self.ids.index_put_((slots, ends - 1), newest.int())

    def release(self, request_ids: Iterable[int]) -> None:
        """Free the slots of these requests."""
        self._free += [self._slots.pop(request_id).index for request_id in request_ids if request_id in self._slots]

    def _take_slots(self, batch: list[int]) -> None:
        """Give each request of a batch a slot: a free one, or that of a request outside the batch."""
        if len(batch) >= len(self.ids):
            self._free += range(len(self.ids), 2 * len(batch) + 1)
            self._reserve(2 * len(batch) + 1, 0)
        present = set(batch)
        idle = [request_id for request_id in self._slots if request_id not in present]
        for request_id in batch:
            if request_id not in self._slots:
                index = self._free.pop() if self._free else self._slots.pop(idle.pop(0)).index
                self._slots[request_id] = _Slot(index)

    def _reserve(self, rows: int, columns: int) -> None:
        """Make the tensor at least this large."""
        more_rows, more_columns = max(rows - self.ids.shape[0], 0), columns - self.ids.shape[1]
        if more_rows or more_columns > 0:
            self.ids = pad(self.ids, (0, more_columns + _SPARE_COLUMNS if more_columns > 0 else 0, 0, more_rows))

    def _write(self, writes: list[tuple[int, int, list[int]]]) -> None:
        """Write tokens from some column of some slot on."""
        if not writes:
            return
        slots, starts, tokens = zip(*writes, strict=True)
        counts = np.array([len(added) for added in tokens])
        ends = counts.cumsum()
        columns = np.arange(ends[-1]) + np.repeat(np.array(starts) - (ends - counts), counts)
        values = np.fromiter(chain.from_iterable(tokens), np.int64, ends[-1])
        parts = upload([np.repeat(slots, counts), columns, values], self.ids.device)
        self.ids.index_put_((parts[0], parts[1]), parts[2].int())


@dataclass(frozen=True, slots=True)
class Histories:
    """What penalties depend on, for the whole batch."""

    num_generated: NDArray[np.int64]  # [B]
    ids: Tensor  # [slots, columns]
    rows: Tensor  # [3, B]: slots, and where in them the outputs start and end; empty if no row has a history
    only_eos: NDArray[np.bool_] | None = None  # [B]: a grammar allows nothing but the end; None: no row has a grammar
    num_forced: int = 0  # tokens that the model forces at the start of an output

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The histories of some rows [r]: their ids [r, columns], and where the outputs start and end [r, 1]."""
        slots, starts, ends = self.rows[:, rows, None]
        return self.ids[slots[:, 0]].long(), starts, ends
