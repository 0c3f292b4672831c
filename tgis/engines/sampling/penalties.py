"""Penalties change the scores of some rows in place, before the temperature and the filters.

Nothing here waits for the device, except a watermark for the newest tokens: its green lists are made on the host, so
that they are the same with every device and detectors can make them again.
"""

import functools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tgis.engines.host_memory import to_device
from tgis.engines.sampling.logits_processors import MIN_DIVISOR, column
from tgis.ipc.request import SamplingParams

_MAX_PENALTY_FACTOR = 1e30  # so that what it boosts stays finite
_MAX_SCORE = 1e38  # of a penalized token, in float32
_SPARE_COLUMNS = 128  # of a token history: for tokens to come, before the tensor grows
_WATERMARK_KEY = 15485863  # as in transformers and TGI
_CACHED_LISTS = 1024  # of watermarks: a random permutation takes about a millisecond


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
    """The tokens of the whole batch that penalties depend on."""

    tokens: TokenHistory | None  # what a repetition penalty and a watermark apply to; None: no row has one
    outputs: TokenHistory | None  # what the model has generated; None: no row has a frequency or presence penalty
    num_generated: Tensor  # [B, 1] int64
    only_eos: Tensor | None = None  # [B, 1] bool: a grammar allows nothing but the end; None: no row has a grammar


class _Penalty(Protocol):
    """A kind of penalty for the rows that use it: `rows` [r, 1] are indices into the scores, `in_batch` [r] into the
    batch.
    """

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: Tensor, eos: Tensor) -> None: ...

    @staticmethod
    def used_by(params: SamplingParams) -> bool: ...

    def apply(self, scores: Tensor, histories: Histories) -> None:
        """Change `scores` [b, V] float32 or float64."""


class _Watermark:
    """The soft red list of Kirchenbauer et al. 2023: the last token seeds a random part of the vocabulary that
    gains.
    """

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: Tensor, _eos: Tensor) -> None:
        marks = [row.watermark or (0.0, 0.0) for row in params]
        self._gammas = [gamma for gamma, _ in marks]
        self._deltas = column([delta for _, delta in marks], torch.float32, rows.device)
        self._rows, self._in_batch = rows[:, 0], in_batch

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        return params.watermark is not None

    def apply(self, scores: Tensor, histories: Histories) -> None:
        assert histories.tokens is not None
        last = histories.tokens.ids.gather(1, histories.tokens.lengths[:, None] - 1)[self._in_batch, 0]
        vocab_size = scores.shape[1]
        packed = [
            _green_list(token, gamma, vocab_size) for token, gamma in zip(last.tolist(), self._gammas, strict=True)
        ]
        is_green = np.unpackbits(np.stack(packed), axis=1, count=vocab_size)
        scores[self._rows] += to_device(is_green, torch.uint8, scores.device) * self._deltas


@functools.lru_cache(_CACHED_LISTS)
def _green_list(token: int, gamma: float, vocab_size: int) -> NDArray[np.uint8]:
    """The ids that a watermark prefers after `token`, one bit for each id of the vocabulary."""
    generator = torch.Generator().manual_seed(_WATERMARK_KEY * token % (2**64 - 1))
    is_green = np.zeros(vocab_size, np.bool_)
    is_green[torch.randperm(vocab_size, generator=generator)[: int(vocab_size * gamma)].numpy()] = True
    return np.packbits(is_green)


class _LogitBias:
    """A constant for each of some tokens."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, _in_batch: Tensor, _eos: Tensor) -> None:
        biases = [row.logit_bias or {} for row in params]
        counts = to_device([len(own) for own in biases], torch.int64, rows.device)
        self._rows = rows[:, 0].repeat_interleave(counts, output_size=sum(map(len, biases)))
        self._ids = to_device([token for own in biases for token in own], torch.int64, rows.device)
        self._values = to_device([value for own in biases for value in own.values()], torch.float32, rows.device)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def apply(self, scores: Tensor, _histories: Histories) -> None:
        scores[self._rows, self._ids] += self._values.to(scores.dtype)


class _EndPenalty:
    """Minimum length and length penalty, which change the scores of the tokens that end a sequence."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: Tensor, eos: Tensor) -> None:
        lengths = [row.length_penalty or (0, 1.0) for row in params]
        self._rows, self._in_batch, self._eos = rows, in_batch, eos
        self._minimum = column([row.min_new_tokens for row in params], torch.float64, eos.device)
        self._start = column([start for start, _ in lengths], torch.float64, eos.device)
        self._decay = column([decay for _, decay in lengths], torch.float64, eos.device)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        return params.min_new_tokens > 0 or params.length_penalty is not None

    def apply(self, scores: Tensor, histories: Histories) -> None:
        num_generated = histories.num_generated[self._in_batch]
        old = scores[self._rows, self._eos]  # [r, ids]
        past_start = num_generated - self._start
        factor = self._decay.pow(past_start.clamp(min=0)).clamp(max=_MAX_PENALTY_FACTOR)
        boosted = old + old.abs() * (factor - 1)
        new = torch.where(old.isfinite(), boosted.to(old.dtype), old)
        below_minimum = num_generated < self._minimum
        if histories.only_eos is not None:
            below_minimum &= ~histories.only_eos[self._in_batch]
        scores[self._rows, self._eos] = new.masked_fill(below_minimum, -torch.inf)


class _RepetitionPenalty:
    """Divides the scores of tokens that were there before, or multiplies them if they are negative."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: Tensor, _eos: Tensor) -> None:
        self._rows, self._in_batch = rows, in_batch
        penalties = [max(row.repetition_penalty, MIN_DIVISOR) for row in params]
        self._penalties = column(penalties, torch.float32, rows.device)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0

    def apply(self, scores: Tensor, histories: Histories) -> None:
        assert histories.tokens is not None
        ids = histories.tokens.ids[self._in_batch]
        old = scores[self._rows, ids]  # [r, W]; duplicate ids read and write the same value
        new = torch.where(old < 0, old * self._penalties, old / self._penalties).clamp(-_MAX_SCORE, _MAX_SCORE)
        scores[self._rows, ids] = torch.where(old.isfinite(), new, old)  # tokens that are excluded stay so


class _OutputPenalty:
    """Frequency and presence penalty, for generated tokens only."""

    def __init__(self, params: list[SamplingParams], rows: Tensor, in_batch: Tensor, _eos: Tensor) -> None:
        self._rows, self._in_batch = rows[:, 0], in_batch
        self._frequency = column([row.frequency_penalty for row in params], torch.float32, rows.device)
        self._presence = column([row.presence_penalty for row in params], torch.float32, rows.device)

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    def apply(self, scores: Tensor, histories: Histories) -> None:
        assert histories.outputs is not None
        ids = histories.outputs.ids[self._in_batch]
        used = torch.arange(ids.shape[1], device=ids.device) < histories.outputs.lengths[self._in_batch, None]
        counts = scores.new_zeros(len(ids), scores.shape[1]).scatter_add_(1, ids, used.to(scores.dtype))
        scores[self._rows] -= self._presence * (counts > 0) + self._frequency * counts


# In the order in which they apply.
_KINDS: tuple[type[_Penalty], ...] = (_Watermark, _LogitBias, _EndPenalty, _RepetitionPenalty, _OutputPenalty)


class Penalties:
    """The penalties of some rows, in the order in which they apply."""

    def __init__(self, params: list[SamplingParams], indices: list[int], eos: Tensor) -> None:
        """`indices` are the places of the rows in the whole batch; `eos` [ids] int64."""
        self._penalties = []
        for kind in _KINDS:
            if rows := [row for row, own in enumerate(params) if kind.used_by(own)]:
                in_batch = to_device([indices[row] for row in rows], torch.int64, eos.device)
                own = [params[row] for row in rows]
                self._penalties.append(kind(own, column(rows, torch.int64, eos.device), in_batch, eos))

    @staticmethod
    def used_by(params: SamplingParams) -> bool:
        """Whether a row has a penalty."""
        return any(kind.used_by(params) for kind in _KINDS)

    @staticmethod
    def need_tokens(params: SamplingParams) -> bool:
        """Whether a penalty of the row depends on the tokens so far."""
        return _RepetitionPenalty.used_by(params) or _Watermark.used_by(params)

    @staticmethod
    def need_outputs(params: SamplingParams) -> bool:
        """Whether a penalty of the row depends on the generated tokens."""
        return _OutputPenalty.used_by(params)

    def __bool__(self) -> bool:
        """Whether any row has a penalty."""
        return bool(self._penalties)

    def apply(self, scores: Tensor, histories: Histories) -> None:
        """Change `scores` [b, V] float32 or float64."""
        for penalty in self._penalties:
            penalty.apply(scores, histories)
