"""Chooses tokens of rows without padding, which are mostly the rows of the last time: a sampler and its context."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.paged.batch import FlatBatch
from tgis.engines.sampling.sampler import SampledTokens, Sampler
from tgis.engines.sampling.token_history import TokenHistory


class BatchSampler:
    """One step is `numbers`, which go to the device with the batch, then `draft`."""

    def __init__(self, vocab_size: int, eos_ids: Iterable[int], device: torch.device) -> None:
        self._sampler = Sampler(vocab_size, eos_ids, device)
        self._history = TokenHistory(lambda row: row.tokens[row.request.soft_prompt_length :], device)
        self._known: list[tuple[int, int]] = []  # ids of the rows, and how many tokens of each are in the context
        self._next: list[tuple[int, int]] = []
        self._behind = False  # whether the context lacks the newest token of every row

    def step_metadata(self, rows: list[Sequence], lookahead: int = 0) -> NDArray[np.float64]:
        """Choose for these rows next; the newest `ahead` tokens of each, 1 at the most, are on the device only."""
        self._next = [(row.id, len(row.tokens) + lookahead) for row in rows]
        grown = self._next == [(number, length + 1) for number, length in self._known]
        if not grown:
            self._sampler.set_seqs(rows)
            self._history.set_seqs(rows)
        self._behind = grown or lookahead > 0
        return self._sampler.step_metadata(lookahead)

    def sample(self, logits: Tensor, batch: FlatBatch) -> SampledTokens:
        """Choose from `logits` [B, V] of the rows, the first that `batch` keeps; it has brought the numbers along."""
        if self._behind:
            self._history.append(batch.input_ids[batch.logits_indices[: len(logits)]])
        self._known = self._next
        return self._sampler.sample(logits, self._history.ids, batch.step_metadata)

    def invalidate(self) -> None:
        """A token that was only on the device has turned out to be another."""
        self._known = []
