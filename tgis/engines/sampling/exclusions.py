"""Tokens that may not come next, in some rows: their scores become -inf. Nothing here waits for the device.

The kinds have the methods of a penalty: `rows` [r, 1] are indices into the scores, `in_batch` [r] into the batch.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tgis.engines.host_memory import to_device
from tgis.engines.sampling.histories import Histories
from tgis.engines.sampling.logits_processors import MIN_DIVISOR, column
from tgis.ipc.request import SamplingParams

_NEVER = 1 << 40  # longer than any output


class AllowedTokens:
    """All tokens but those that a request allows."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, _in_batch: Tensor, _eos: Tensor) -> None:
        self._all_rows = rows[:, 0]
        allowed = [row.allowed_token_ids or () for row in params]
        self._rows, self._ids = repeat_rows(rows[:, 0], allowed), flat_ids(allowed, rows.device)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def apply(self, scores: Tensor, _histories: Histories) -> None:
        kept = scores[self._rows, self._ids]
        scores.index_fill_(0, self._all_rows, -torch.inf)
        scores[self._rows, self._ids] = kept


class ExcludedWords:
    """The last token of each word for which the output ends with all tokens before it: of bad words, and of tokens that
    end an output, words of one token, below its minimum length.
    """

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: Tensor, _eos: Tensor) -> None:
        device = rows.device
        words_of = [[*row.bad_words, *((token,) for token in row.stop_token_ids)] for row in params]
        ends = [[_NEVER] * len(row.bad_words) + [row.min_new_tokens] * len(row.stop_token_ids) for row in params]
        words = [word for own in words_of for word in own]
        beginnings = [word[:-1] for word in words]
        self._rows, self._in_batch = repeat_rows(rows[:, 0], words_of), repeat_rows(in_batch, words_of)
        self._last = to_device([word[-1] for word in words], torch.int64, device)
        self._end = flat_ids(ends, device)[:, None]  # the length from which on the word may come
        # Of each token of the beginnings: its word, and its distance from the end of the output.
        self._words = repeat_rows(torch.arange(len(words), device=device), beginnings)
        self._distances = flat_ids([range(len(each), 0, -1) for each in beginnings], device)
        self._tokens = flat_ids(beginnings, device)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        return bool(params.bad_words) or (params.min_new_tokens > 0 and bool(params.stop_token_ids))

    def apply(self, scores: Tensor, histories: Histories) -> None:
        assert histories.outputs is not None
        in_batch = self._in_batch[self._words]
        places = histories.outputs.lengths[in_batch] - self._distances
        differs = (places < 0) | (histories.outputs.ids[in_batch, places.clamp(min=0)] != self._tokens)
        num_different = torch.zeros_like(self._last).index_add_(0, self._words, differs.long())
        excluded = (num_different == 0) & histories.below_minimum(self._in_batch, self._end)[:, 0]
        changes = torch.zeros_like(self._last, dtype=scores.dtype).masked_fill_(excluded, -torch.inf)
        scores.index_put_((self._rows, self._last), changes, accumulate=True)  # tokens may come several times


class MinP:
    """Tokens that have less than a share of the probability of the best one."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, _in_batch: Tensor, _eos: Tensor) -> None:
        self._rows = rows[:, 0]
        below_best = [max(row.temperature, MIN_DIVISOR) * math.log(row.min_p) for row in params]
        self._below_best = column(below_best, torch.float64, rows.device)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        return params.min_p > 0.0 and not params.greedy

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
