"""The tokens of every row as one tensor, for the repetition penalty. Kept only while some row has a penalty."""

from array import array
from collections.abc import Callable

import numpy as np
import torch

from tgis.batcher.sequence import Sequence
from tgis.engines.kernels.transfers import to_device

_SPARE_COLUMNS = 128  # columns for tokens to come, before the tensor is made anew


class TokenHistory:
    """Token ids of the rows, int64 [rows, columns]; unused columns repeat a row's first token, so they add no id."""

    def __init__(self, tokens_of: Callable[[Sequence], list[int]], device: torch.device) -> None:
        """`tokens_of` tells which tokens of a row a penalty applies to, the newest one last."""
        self._tokens_of = tokens_of
        self._device = device
        self._max_length = 0  # tokens of a row; 0 while no row has a penalty
        self._next_columns = torch.empty(0, dtype=torch.int64, device=device)  # [rows], of each row's next token
        self.ids = torch.empty((0, 0), dtype=torch.int64, device=device)

    def set_seqs(self, seqs: list[Sequence]) -> None:
        """The rows have changed: start again from their tokens."""
        wanted = any(row.request.sampling_params.repetition_penalty != 1.0 for row in seqs)
        tokens = [self._tokens_of(row) for row in seqs] if wanted else []
        lengths = [len(some) for some in tokens]
        self._max_length = max(lengths, default=0)
        ids = np.empty((len(seqs), self._max_length + _SPARE_COLUMNS if wanted else 0), dtype=np.int64)
        for place, some in enumerate(tokens):
            ids[place, : len(some)] = array("q", some)
            ids[place, len(some) :] = some[0]
        self._next_columns = to_device(lengths, torch.int64, self._device)
        self.ids = to_device(ids, torch.int64, self._device)

    def append(self, newest: torch.Tensor) -> None:
        """Every row has got one token more, [rows]."""
        if not self._max_length:
            return
        if self._max_length == self.ids.shape[1]:
            self.ids = torch.cat([self.ids, self.ids[:, :1].expand(-1, _SPARE_COLUMNS)], 1)
        self.ids.scatter_(1, self._next_columns[:, None], newest[:, None])
        self._next_columns = self._next_columns + 1
        self._max_length += 1
