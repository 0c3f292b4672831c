"""The tokens of every row as one tensor, for the repetition penalty. Kept only while some row has a penalty."""

import torch

from tgis.batcher.sequence import Sequence

_ROOM = 128  # columns for tokens to come, before the tensor is made anew


class TokenContext:
    """Token ids of the rows, int64 [rows, columns]; unused columns repeat a row's first token, so they add no id."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[Sequence] = []
        self._wanted = False
        self.ids = torch.empty((0, 0), dtype=torch.int64, device=device)

    def set_rows(self, rows: list[Sequence]) -> None:
        """The rows have changed: start again from their tokens."""
        self._rows = list(rows)
        self._wanted = any(row.request.sampling.repetition_penalty != 1.0 for row in rows)
        if not self._wanted:
            self.ids = torch.empty((len(rows), 0), dtype=torch.int64, device=self._device)
            return
        width = max(len(row.tokens) for row in rows) + _ROOM
        filled = [row.tokens + row.tokens[:1] * (width - len(row.tokens)) for row in rows]
        self.ids = torch.tensor(filled, dtype=torch.int64, device=self._device)

    def append(self, newest: torch.Tensor) -> None:
        """Add the newest token of every row, [rows]."""
        if not self._wanted:
            return
        columns = [len(row.tokens) - 1 for row in self._rows]
        if max(columns) >= self.ids.shape[1]:
            self.set_rows(self._rows)
        else:
            every = torch.arange(len(columns), device=self._device)
            self.ids[every, torch.tensor(columns, device=self._device)] = newest
