"""The tokens of every row as one tensor, for the repetition penalty. Kept only while some row has a penalty."""

from collections.abc import Callable

import torch

from tgis.batcher.sequence import Sequence

_ROOM = 128  # columns for tokens to come, before the tensor is made anew


class TokenContext:
    """Token ids of the rows, int64 [rows, columns]; unused columns repeat a row's first token, so they add no id."""

    def __init__(self, tokens_of: Callable[[Sequence], list[int]], device: torch.device) -> None:
        """`tokens_of` tells which tokens of a row a penalty applies to, the newest one last."""
        self._tokens_of = tokens_of
        self._device = device
        self._rows: list[Sequence] = []
        self._lengths: list[int] = []  # empty while no row has a penalty
        self.ids = torch.empty((0, 0), dtype=torch.int64, device=device)

    def set_rows(self, rows: list[Sequence]) -> None:
        """The rows have changed: start again from their tokens."""
        self._rows = list(rows)
        wanted = any(row.request.sampling.repetition_penalty != 1.0 for row in rows)
        tokens = [self._tokens_of(row) for row in rows] if wanted else []
        self._lengths = [len(some) for some in tokens]
        width = max(self._lengths) + _ROOM if wanted else 0
        filled = [some + some[:1] * (width - len(some)) for some in tokens]
        self.ids = torch.tensor(filled, dtype=torch.int64, device=self._device).view(len(rows), width)

    def append(self, newest: torch.Tensor) -> None:
        """Every row has got one token more, [rows]."""
        if not self._lengths:
            return
        if max(self._lengths) >= self.ids.shape[1]:
            self.set_rows(self._rows)
            return
        every = torch.arange(len(self._lengths), device=self._device)
        self.ids[every, torch.tensor(self._lengths, device=self._device)] = newest
        self._lengths = [length + 1 for length in self._lengths]
