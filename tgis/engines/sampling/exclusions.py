"""Tokens that may not come next, in some rows: their scores become -inf. Nothing here waits for the device.

The kinds have the methods of a penalty: `rows` [r, 1] are indices into the scores, `in_batch` into the batch.
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from tgis.engines.host_memory import to_device
from tgis.engines.sampling.histories import Histories
from tgis.engines.sampling.logits_processors import MIN_DIVISOR, column
from tgis.ipc.request import SamplingParams


class AllowedTokens:
    """All tokens but those that a request allows."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, _in_batch: list[int], _eos: Tensor) -> None:
        self._all_rows = rows[:, 0]
        allowed = [row.allowed_token_ids or () for row in params]
        self._rows, self._ids = repeat_rows(rows[:, 0], allowed), flat_ids(allowed, rows.device)

    def apply(self, scores: Tensor, _histories: Histories) -> None:
        kept = scores[self._rows, self._ids]
        scores.index_fill_(0, self._all_rows, -torch.inf)
        scores[self._rows, self._ids] = kept


class BadWords:
    """The last token of each word for which the output ends with all tokens before it."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: list[int], _eos: Tensor) -> None:
        device = rows.device
        words_of = [row.bad_words for row in params]
        words = [word for own in words_of for word in own]
        beginnings = [word[:-1] for word in words]
        self._rows = repeat_rows(rows[:, 0], words_of)
        self._in_batch = np.repeat(in_batch, [len(own) for own in words_of])
        self._last = to_device([word[-1] for word in words], torch.int64, device)
        # The row in the batch, the word, and the distance from the end of the output, for each token of the beginnings.
        self._token_rows = to_device(np.repeat(self._in_batch, [len(own) for own in beginnings]), torch.int64, device)
        self._words = repeat_rows(torch.arange(len(words), device=device), beginnings)
        self._distances = flat_ids([range(len(each), 0, -1) for each in beginnings], device)
        self._tokens = flat_ids(beginnings, device)

    def apply(self, scores: Tensor, histories: Histories) -> None:
        assert histories.outputs is not None
        places = histories.outputs.lengths[self._token_rows] - self._distances
        differs = (places < 0) | (histories.outputs.ids[self._token_rows, places.clamp(min=0)] != self._tokens)
        num_different = torch.zeros_like(self._last).index_add_(0, self._words, differs.long())
        if histories.only_eos is not None:  # these rows must be able to end
            num_different += to_device(histories.only_eos[self._in_batch], torch.int64, scores.device)
        changes = torch.zeros_like(self._last, dtype=scores.dtype).masked_fill_(num_different == 0, -torch.inf)
        scores.index_put_((self._rows, self._last), changes, accumulate=True)  # tokens may come several times


class MinLength:
    """The tokens that end an output, below its minimum length. Most steps exclude the same ones as the step before."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: list[int], eos: Tensor) -> None:
        stops = [row.stop_token_ids for row in params]
        self._rows = torch.cat([rows.expand(-1, len(eos)).flatten(), repeat_rows(rows[:, 0], stops)])
        self._ids = torch.cat([eos.repeat(len(params)), flat_ids(stops, eos.device)])
        own = [*np.repeat(range(len(params)), len(eos)), *np.repeat(range(len(params)), [len(each) for each in stops])]
        self._in_batch = np.array(in_batch)[own]
        self._minimum = np.array([row.min_new_tokens for row in params])[own]
        self._below = np.zeros(0, np.bool_)  # in the last step
        self._changes = eos[:0]

    def apply(self, scores: Tensor, histories: Histories) -> None:
        below = histories.num_generated[self._in_batch] < self._minimum
        if histories.only_eos is not None:
            below &= ~histories.only_eos[self._in_batch]
        if not np.array_equal(below, self._below):
            self._below, self._changes = below, to_device(np.where(below, -np.inf, 0.0), scores.dtype, scores.device)
        if below.any():
            scores.index_put_((self._rows, self._ids), self._changes, accumulate=True)


class MinP:
    """Tokens that have less than a share of the probability of the best one."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, _in_batch: list[int], _eos: Tensor) -> None:
        self._rows = rows[:, 0]
        below_best = [max(row.temperature, MIN_DIVISOR) * math.log(row.min_p) for row in params]
        self._below_best = column(below_best, torch.float64, rows.device)

    def apply(self, scores: Tensor, _histories: Histories) -> None:
        own = scores[self._rows]
        lowest = own.amax(-1, keepdim=True) + self._below_best.to(own.dtype)
        scores[self._rows] = own.masked_fill_(own < lowest, -torch.inf)


def repeat_rows(rows: Tensor, lists: Sequence[Collection[object]]) -> Tensor:
    """Each row [r] once for every entry of its list."""
    counts = to_device([len(own) for own in lists], torch.int64, rows.device)
    return rows.repeat_interleave(counts, output_size=sum(map(len, lists)))


def flat_ids(lists: Sequence[Collection[int]], device: torch.device) -> Tensor:
    """All entries of the lists, one list after another."""
    return to_device([entry for own in lists for entry in own], torch.int64, device)
