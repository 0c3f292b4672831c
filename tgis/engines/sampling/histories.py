"""The tokens so far of the rows of a batch, on the device: what penalties and exclusions depend on."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.engines.host_memory import to_device

_SPARE_COLUMNS = 128  # of a token history: for tokens to come, before the tensor grows


class TokenHistory:
    """The tokens of every row in one tensor, int64 [rows, columns]. Unused columns repeat the row's first token, so
    that they add no id, or are 0 in a row without tokens.
    """

    def __init__(self, histories: Iterable[list[int]], device: torch.device) -> None:
        """`histories` are the tokens of each row."""
        tokens = list(histories)
        lengths = [len(own) for own in tokens]
        self._max_length = max(lengths)
        ids = np.empty((len(tokens), self._max_length + _SPARE_COLUMNS), dtype=np.int64)
        for row, own in zip(ids, tokens, strict=True):
            row[: len(own)] = array("q", own)
            row[len(own) :] = own[0] if own else 0
        self.lengths = to_device(lengths, torch.int64, device)  # [rows]
        self.ids = to_device(ids, torch.int64, device)

    def append(self, newest: Tensor) -> None:
        """Append one token to every row, [rows]."""
        if self._max_length == self.ids.shape[1]:
            self.ids = torch.cat([self.ids, self.ids[:, :1].expand(-1, _SPARE_COLUMNS)], 1)
        self.ids.scatter_(1, self.lengths[:, None], newest[:, None])
        self.lengths = self.lengths + 1
        self._max_length += 1


@dataclass(frozen=True, slots=True)
class Histories:
    """What penalties depend on, for the whole batch."""

    tokens: TokenHistory | None  # what a repetition penalty and a watermark apply to; None: no row has one
    outputs: TokenHistory | None  # what the model has generated; None: nothing depends on it
    num_generated: NDArray[np.int64]  # [B]
    only_eos: NDArray[np.bool_] | None = None  # [B]: a grammar allows nothing but the end; None: no row has a grammar
