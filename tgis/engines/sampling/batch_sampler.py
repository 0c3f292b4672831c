"""Chooses tokens of rows without padding, which are mostly the rows of the last time: a sampler and its context."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.paged.batch import FlatBatch
from tgis.engines.sampling.sampler import Draft, Sampler
from tgis.engines.sampling.token_history import TokenContext


class Chooser:
    """One step is `numbers`, which go to the device with the batch, then `draft`."""

    def __init__(self, vocab_size: int, eos_ids: Iterable[int], device: torch.device) -> None:
        self._sampler = Sampler(vocab_size, eos_ids, device)
        self._context = TokenContext(lambda row: row.tokens[row.request.prefix_length :], device)
        self._known: list[tuple[int, int]] = []  # ids of the rows, and how many tokens of each are in the context
        self._next: list[tuple[int, int]] = []
        self._behind = False  # whether the context lacks the newest token of every row

    def numbers(self, rows: list[Sequence], ahead: int = 0) -> NDArray[np.float64]:
        """Choose for these rows next; the newest `ahead` tokens of each, 1 at the most, are on the device only."""
        self._next = [(row.id, len(row.tokens) + ahead) for row in rows]
        grown = self._next == [(number, length + 1) for number, length in self._known]
        if not grown:
            self._sampler.set_rows(rows)
            self._context.set_rows(rows)
        self._behind = grown or ahead > 0
        return self._sampler.numbers(ahead)

    def draft(self, logits: Tensor, batch: FlatBatch) -> Draft:
        """Choose from `logits` [B, V] of the rows, the first that `batch` keeps; it has brought the numbers along."""
        if self._behind:
            self._context.append(batch.ids[batch.kept[: len(logits)]])
        self._known = self._next
        return self._sampler.draft(logits, self._context.ids, batch.numbers)

    def forget(self) -> None:
        """A token that was only on the device has turned out to be another."""
        self._known = []
