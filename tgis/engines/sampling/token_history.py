"""The tokens of every row as one tensor, for the repetition penalty."""

from array import array
from collections.abc import Iterable

import numpy as np
import torch

from tgis.engines.transfers import to_device

_SPARE_COLUMNS = 128  # for tokens to come, before the tensor grows


class TokenHistory:
    """Token ids of the rows, int64 [rows, columns]; unused columns repeat a row's first token, so they add no id."""

    def __init__(self, histories: Iterable[list[int]], device: torch.device) -> None:
        """By row, one token at least."""
        tokens = list(histories)
        lengths = [len(own) for own in tokens]
        self._max_length = max(lengths)
        ids = np.empty((len(tokens), self._max_length + _SPARE_COLUMNS), dtype=np.int64)
        for row, own in zip(ids, tokens, strict=True):
            row[: len(own)] = array("q", own)
            row[len(own) :] = own[0]
        self._next_columns = to_device(lengths, torch.int64, device)  # [rows]
        self.ids = to_device(ids, torch.int64, device)

    def append(self, newest: torch.Tensor) -> None:
        """One more token of every row, [rows]."""
        if self._max_length == self.ids.shape[1]:
            self.ids = torch.cat([self.ids, self.ids[:, :1].expand(-1, _SPARE_COLUMNS)], 1)
        self.ids.scatter_(1, self._next_columns[:, None], newest[:, None])
        self._next_columns = self._next_columns + 1
        self._max_length += 1
