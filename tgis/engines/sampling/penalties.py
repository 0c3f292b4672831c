"""Penalties change the scores of some rows in place, before the temperature and the filters; some exclude tokens, whose
scores become -inf.

Nothing here waits for the device, except a watermark for the newest tokens: its green lists are made on the host, so
that they are the same with every device and detectors can make them again.
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.engines.host_memory import to_device
from tgis.engines.sampling.histories import Histories
from tgis.engines.sampling.logits_processors import MIN_DIVISOR, column
from tgis.ipc.request import SamplingParams

_MAX_PENALTY_FACTOR = 1e30  # so that what it boosts stays finite
_MAX_SCORE = 1e38  # largest magnitude of a penalized score, in float32
# As in transformers and TGI: a seed, the share of the vocabulary that gains, and the gain of its logits.
_WATERMARK_KEY, _WATERMARK_SHARE, _WATERMARK_BIAS = 15485863, 0.5, 2.0
_CACHED_LISTS = 1024  # lists of watermarks kept: a random permutation takes about a millisecond


class Ends(NamedTuple):
    """The tokens [n] int64 that end a sequence, and those of them that a length penalty makes likelier."""

    ids: Tensor
    boosted: Tensor


class _Penalty(Protocol):
    """A kind of penalty for the rows that use it: `rows` [r, 1] index the scores, `in_batch` the batch."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: list[int], eos: Tensor) -> None: ...

    def apply(self, scores: Tensor, histories: Histories) -> None:
        """Change `scores` [b, V] float32 or float64."""


class _AllowedTokens:
    """Excludes all tokens but those that a request allows."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, _in_batch: list[int], _eos: Tensor) -> None:
        self._all_rows = rows[:, 0]
        allowed = [row.allowed_token_ids or () for row in params]
        self._rows, self._ids = _repeat_rows(rows[:, 0], allowed), _flat_ids(allowed, rows.device)

    def apply(self, scores: Tensor, _histories: Histories) -> None:
        kept = scores[self._rows, self._ids]
        scores.index_fill_(0, self._all_rows, -torch.inf)
        scores[self._rows, self._ids] = kept


class _BadWords:
    """Excludes the last token of each word for which the output ends with all tokens before it."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: list[int], _eos: Tensor) -> None:
        device = rows.device
        bad_words = [row.bad_words for row in params]
        words = [word for row_words in bad_words for word in row_words]
        prefixes = [word[:-1] for word in words]
        self._rows = _repeat_rows(rows[:, 0], bad_words)
        self._in_batch = np.repeat(in_batch, list(map(len, bad_words)))
        self._last = to_device([word[-1] for word in words], torch.int64, device)
        # The row in the batch, the word, and the distance from the end of the output, for each token of the prefixes.
        self._token_rows = to_device(np.repeat(self._in_batch, list(map(len, prefixes))), torch.int64, device)
        self._words = _repeat_rows(torch.arange(len(words), device=device), prefixes)
        self._distances = _flat_ids([range(len(prefix), 0, -1) for prefix in prefixes], device)
        self._tokens = _flat_ids(prefixes, device)

    def apply(self, scores: Tensor, histories: Histories) -> None:
        slots, starts, ends = histories.rows[:, self._token_rows]
        columns = ends - self._distances
        differs = (columns < starts) | (histories.ids[slots, columns.clamp(min=0)] != self._tokens)
        num_different = torch.zeros_like(self._last).index_add_(0, self._words, differs.long())
        if histories.only_eos is not None:  # these rows must be able to end
            num_different += to_device(histories.only_eos[self._in_batch], torch.int64, scores.device)
        changes = torch.zeros_like(self._last, dtype=scores.dtype).masked_fill_(num_different == 0, -torch.inf)
        scores.index_put_((self._rows, self._last), changes, accumulate=True)  # tokens may come several times


class _MinLength:
    """Excludes the tokens that end an output, below its minimum length."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: list[int], eos: Tensor) -> None:
        stops = [row.stop_token_ids for row in params]
        self._rows = torch.cat([rows.expand(-1, len(eos)).flatten(), _repeat_rows(rows[:, 0], stops)])
        self._ids = torch.cat([eos.repeat(len(params)), _flat_ids(stops, eos.device)])
        indices = range(len(params))
        # Same order in `self._ids`.
        entries = [*np.repeat(indices, len(eos)), *np.repeat(indices, list(map(len, stops)))]
        self._in_batch = np.array(in_batch)[entries]
        self._minimum = np.array([row.min_new_tokens for row in params])[entries]

    def apply(self, scores: Tensor, histories: Histories) -> None:
        below = histories.num_generated[self._in_batch] < self._minimum
        if histories.only_eos is not None:
            below &= ~histories.only_eos[self._in_batch]
        if below.any():
            changes = to_device(np.where(below, -np.inf, 0.0), scores.dtype, scores.device)
            scores.index_put_((self._rows, self._ids), changes, accumulate=True)


class _MinP:
    """Excludes tokens that have less than a share of the probability of the best one."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, _in_batch: list[int], _eos: Tensor) -> None:
        self._rows = rows[:, 0]
        below_best = [max(row.temperature, MIN_DIVISOR) * math.log(row.min_p) for row in params]
        self._below_best = column(below_best, torch.float64, rows.device)

    def apply(self, scores: Tensor, _histories: Histories) -> None:
        values = scores[self._rows]
        lowest = values.amax(-1, keepdim=True) + self._below_best.to(values.dtype)
        scores[self._rows] = values.masked_fill_(values < lowest, -torch.inf)


class _Watermark:
    """The soft red list of Kirchenbauer et al. 2023: the last token seeds a random part of the vocabulary that
    gains.
    """

    def __init__(self, _params: list[SamplingParams], rows: Tensor, in_batch: list[int], _eos: Tensor) -> None:
        self._rows, self._in_batch = rows[:, 0], to_device(in_batch, torch.int64, rows.device)

    def apply(self, scores: Tensor, histories: Histories) -> None:
        slots, _, ends = histories.rows[:, self._in_batch]
        last = histories.ids[slots, ends - 1]
        vocab_size = scores.shape[1]
        packed = [_green_list(token, vocab_size) for token in last.tolist()]
        is_green = np.unpackbits(np.stack(packed), axis=1, count=vocab_size)
        scores[self._rows] += to_device(is_green, torch.uint8, scores.device) * _WATERMARK_BIAS


@functools.lru_cache(_CACHED_LISTS)
def _green_list(token: int, vocab_size: int) -> NDArray[np.uint8]:
    """The ids that a watermark prefers after `token`, one bit for each id of the vocabulary."""
    generator = torch.Generator().manual_seed(_WATERMARK_KEY * token % (2**64 - 1))
    is_green = np.zeros(vocab_size, np.bool_)
    is_green[torch.randperm(vocab_size, generator=generator)[: int(vocab_size * _WATERMARK_SHARE)].numpy()] = True
    return np.packbits(is_green)


class _LogitBias:
    """A constant for each of some tokens."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, _in_batch: list[int], _eos: Tensor) -> None:
        biases = [row.logit_bias or {} for row in params]
        self._rows, self._ids = _repeat_rows(rows[:, 0], biases), _flat_ids(biases, rows.device)
        self._values = to_device([value for bias in biases for value in bias.values()], torch.float32, rows.device)

    def apply(self, scores: Tensor, _histories: Histories) -> None:
        scores[self._rows, self._ids] += self._values.to(scores.dtype)


class _LengthPenalty:
    """Makes the tokens that end a sequence likelier with each one beyond some length."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: list[int], eos: Tensor) -> None:
        self._rows, self._in_batch, self._eos = rows, in_batch, eos
        self._start, self._decay = np.array([row.length_penalty for row in params]).T

    def apply(self, scores: Tensor, histories: Histories) -> None:
        past_start = np.maximum(histories.num_generated[self._in_batch] - self._start, 0)
        with np.errstate(over="ignore"):
            factors = np.minimum(self._decay**past_start, _MAX_PENALTY_FACTOR)
        old = scores[self._rows, self._eos]  # [r, ids]
        boosted = old + old.abs() * column(factors - 1, torch.float64, scores.device)
        scores[self._rows, self._eos] = torch.where(old.isfinite(), boosted.to(old.dtype), old)


class _RepetitionPenalty:
    """Divides the scores of tokens that were there before, or multiplies them if they are negative."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: list[int], _eos: Tensor) -> None:
        self._rows, self._in_batch = rows, to_device(in_batch, torch.int64, rows.device)
        penalties = [max(row.repetition_penalty, MIN_DIVISOR) for row in params]
        self._penalties = column(penalties, torch.float32, rows.device)

    def apply(self, scores: Tensor, histories: Histories) -> None:
        ids, _, ends = histories.of(self._in_batch)
        ids = torch.where(torch.arange(ids.shape[1], device=ids.device) < ends, ids, ids[:, :1])
        old = scores[self._rows, ids]  # [r, W]; duplicate ids read and write the same value
        new = torch.where(old < 0, old * self._penalties, old / self._penalties).clamp(-_MAX_SCORE, _MAX_SCORE)
        scores[self._rows, ids] = torch.where(old.isfinite(), new, old)  # tokens that are excluded stay so


class _OutputPenalty:
    """Frequency and presence penalty, for generated tokens only."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: list[int], _eos: Tensor) -> None:
        self._rows, self._in_batch = rows[:, 0], to_device(in_batch, torch.int64, rows.device)
        self._frequency = column([row.frequency_penalty for row in params], torch.float32, rows.device)
        self._presence = column([row.presence_penalty for row in params], torch.float32, rows.device)

    def apply(self, scores: Tensor, histories: Histories) -> None:
        ids, starts, ends = histories.of(self._in_batch)
        columns = torch.arange(ids.shape[1], device=ids.device)
        used = (columns >= starts) & (columns < ends)
        counts = scores.new_zeros(len(ids), scores.shape[1]).scatter_add_(1, ids, used.to(scores.dtype))
        scores[self._rows] -= self._presence * (counts > 0) + self._frequency * counts


def _repeat_rows(rows: Tensor, lists: Sequence[Collection[object]]) -> Tensor:
    """Each row [r] once for every entry of its list."""
    counts = to_device(list(map(len, lists)), torch.int64, rows.device)
    return rows.repeat_interleave(counts, output_size=sum(map(len, lists)))


def _flat_ids(lists: Sequence[Collection[int]], device: torch.device) -> Tensor:
    """All entries of the lists, one list after another."""
    return to_device([entry for entries in lists for entry in entries], torch.int64, device)


# Whether a row has a penalty of a kind, in the order in which they apply; none brings a token back that is excluded.
_USED_BY: dict[type[_Penalty], Callable[[SamplingParams], bool]] = {
    _AllowedTokens: lambda params: params.allowed_token_ids is not None,
    _BadWords: lambda params: bool(params.bad_words),
    _MinLength: lambda params: params.min_new_tokens > 0,
    _Watermark: lambda params: params.watermark,
    _LogitBias: lambda params: bool(params.logit_bias),
    _LengthPenalty: lambda params: params.length_penalty is not None,
    _RepetitionPenalty: lambda params: params.repetition_penalty != 1.0,
    _OutputPenalty: lambda params: params.frequency_penalty != 0.0 or params.presence_penalty != 0.0,
    _MinP: lambda params: params.min_p > 0.0 and not params.greedy,
}
_IN_ANY_DTYPE = _AllowedTokens, _BadWords, _MinLength  # these compute nothing


class Penalties:
    """The penalties of some rows, in the order in which they apply."""

    def __init__(self, params: list[SamplingParams], indices: list[int], eos: Ends) -> None:
        """`indices` are the places of the rows in the whole batch."""
        self._penalties, self._indices = [], indices
        for kind, is_used_by in _USED_BY.items():
            if rows := [row for row, row_params in enumerate(params) if is_used_by(row_params)]:
                in_batch, users = [indices[row] for row in rows], [params[row] for row in rows]
                ids = eos.boosted if kind is _LengthPenalty else eos.ids
                self._penalties.append(kind(users, column(rows, torch.int64, ids.device), in_batch, ids))

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        """Whether a row has a penalty."""
        return any(is_used_by(params) for is_used_by in _USED_BY.values())

    @staticmethod
    def need_prompt(params: SamplingParams) -> bool:
        """Whether a penalty of the row depends on the prompt too."""
        return _USED_BY[_RepetitionPenalty](params) or _USED_BY[_Watermark](params)

    @staticmethod
    def need_history(params: SamplingParams) -> bool:
        """Whether a penalty of the row depends on the tokens so far."""
        kinds = _RepetitionPenalty, _Watermark, _OutputPenalty, _BadWords
        return any(_USED_BY[kind](params) for kind in kinds)

    def __bool__(self) -> bool:
        """Whether any row has a penalty."""
        return bool(self._penalties)

    def apply(self, scores: Tensor, histories: Histories) -> Tensor:
        """Change `scores` [b, V], or a copy in float32 where numbers change."""
        if scores.dtype != torch.float64 and not all(isinstance(penalty, _IN_ANY_DTYPE) for penalty in self._penalties):
            scores = scores.float()
        forced = np.flatnonzero(histories.num_generated[self._indices] < histories.num_forced).tolist()
        kept = scores[forced] if forced else None
        for penalty in self._penalties:
            penalty.apply(scores, histories)
        if kept is not None:
            scores[forced] = kept
        return scores
