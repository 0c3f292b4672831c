"""Changes of the scores before a token is chosen: penalties over whole rows, filters over the best tokens.

A filter never changes the order of tokens, so a list of the best ones is enough as long as it reaches far
enough down: `Remaining.sure` says so for each row, and who asks does a row that is not sure again with a
longer list. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tgis.engines.kernels.transfers import to_device
from tgis.ipc.request import SamplingParams

_MIN_TEMPERATURE = 1e-30  # a temperature below it would divide to infinity; the best token wins long before
_MAX_PENALTY_FACTOR = 1e30  # a factor stops here, so that what it boosts stays a number
_LOG_ZERO = -1e4  # far below the logarithm of any float but zero
_MAGNITUDE_MASK = 0x7FFFFFFF  # the bits of a float32 but the sign
_ID_BITS = 32  # of a key to sort by, below the score
_ID_MASK = (1 << _ID_BITS) - 1
_STRIDE = 256  # tokens of which the best is looked for first
_MAX_TOPK = 256  # beyond it sorting everything takes no longer than selecting
_CPU_BLOCK_SCORES, _GPU_BLOCK_SCORES = 1 << 19, 1 << 26  # scores computed with at a time


def column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One parameter of all rows, [b, 1]."""
    return to_device(values, dtype, device)[:, None]


class Penalties:
    """Minimum length, length penalty and repetition penalty of some rows, in this order, in place."""

    def __init__(self, rows: list[SamplingParams], places: list[int], eos: Tensor) -> None:
        """`places` are those of the rows in the whole batch, that is in `context`; `eos` [ids] int64."""
        device = eos.device
        ends = [i for i, row in enumerate(rows) if row.min_new_tokens or row.length_penalty]
        repeats = [i for i, row in enumerate(rows) if row.repetition_penalty != 1.0]
        lengths = [rows[i].length_penalty or (0, 1.0) for i in ends]
        self._ends = column(ends, torch.int64, device)
        self._eos = eos
        self._minimum = column([rows[i].min_new_tokens for i in ends], torch.float64, device)
        self._start = column([start for start, _ in lengths], torch.float64, device)
        self._decay = column([decay for _, decay in lengths], torch.float64, device)
        self._repeats = column(repeats, torch.int64, device)
        self._repeats_in_batch = to_device([places[i] for i in repeats], torch.int64, device)
        self._repetition = column([rows[i].repetition_penalty for i in repeats], torch.float32, device)

    def __bool__(self) -> bool:
        """Whether any row has one."""
        return len(self._ends) > 0 or len(self._repeats) > 0

    def apply(self, scores: Tensor, token_history: Tensor, num_generated: Tensor) -> None:
        """Change `scores` [b, V] float32 or float64; `context` [B, W] int64, `generated` [b, 1] float64."""
        if len(self._ends):
            self._change_eos(scores, num_generated[self._ends[:, 0]])
        if len(self._repeats):
            self._penalise_repetition(scores, token_history[self._repeats_in_batch])

    def _change_eos(self, scores: Tensor, generated: Tensor) -> None:
        old = scores[self._ends, self._eos]  # [e, ids]
        past = generated - self._start
        factor = self._decay.pow(past.clamp(min=0)).clamp(max=_MAX_PENALTY_FACTOR)
        boosted = old + old.abs() * (factor - 1)
        new = torch.where(old.isfinite(), boosted.to(old.dtype), old)
        scores[self._ends, self._eos] = new.masked_fill(generated < self._minimum, -torch.inf)

    def _penalise_repetition(self, scores: Tensor, context: Tensor) -> None:
        old = scores[self._repeats, context]  # [r, W]; an id that occurs twice is read and written alike
        scores[self._repeats, context] = torch.where(old < 0, old * self._repetition, old / self._repetition)


@dataclass(frozen=True, slots=True)
class Filters:
    """Temperature and filters of some rows, each [b, 1]; None where no row has the filter."""

    temperature: Tensor  # float64; 1 for a greedy row
    top_k: Tensor | None  # int64; 0 is off
    top_p: Tensor | None  # float64; 1 is off
    typical_p: Tensor | None  # float64; 1 is off

    @classmethod
    def of(cls, rows: list[SamplingParams], vocabulary: int, device: torch.device) -> Self:
        """Those of `rows`; a greedy row has none, nor does a top_k of the whole vocabulary filter."""
        rows = [SamplingParams(temperature=1.0) if row.greedy else row for row in rows]
        return cls(
            column([max(row.temperature, _MIN_TEMPERATURE) for row in rows], torch.float64, device),
            _column_if_used([row.top_k if row.top_k < vocabulary else 0 for row in rows], 0, torch.int64, device),
            _column_if_used([row.top_p for row in rows], 1.0, torch.float64, device),
            _column_if_used([row.typical_p for row in rows], 1.0, torch.float64, device),
        )

    def take(self, rows: Tensor) -> "Filters":
        """Those of some of the rows."""
        filters = (self.top_k, self.top_p, self.typical_p)
        return Filters(self.temperature[rows], *(None if each is None else each[rows] for each in filters))


def _column_if_used(values: list[float], off: float, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    return column(values, dtype, device) if any(value != off for value in values) else None


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of some rows, penalties included, and what puts them in proportion."""

    values: Tensor  # [b, V] any float
    max_score: Tensor  # [b, 1] float32, the highest of each row; not finite if the row cannot be used
    temperature: Tensor  # [b, 1] float64

    def take(self, rows: Tensor | slice) -> "Scores":
        """Those of some of the rows."""
        return Scores(self.values[rows], self.max_score[rows], self.temperature[rows])

    def row_blocks(self) -> list[slice]:
        """The rows, so many at a time that what is computed from them fits a cache, or at least the memory."""
        size = self._rows_per_block()
        return [slice(start, start + size) for start in range(0, len(self.values), size)]

    def map_row_blocks(self, table: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
        """`table` of some of the rows, for so many at a time."""
        return lambda rows, length: torch.cat([table(some, length) for some in rows.split(self._rows_per_block())])

    def _rows_per_block(self) -> int:
        vocabulary: int = self.values.shape[1]
        return max(1, (_CPU_BLOCK_SCORES if self.values.is_cpu else _GPU_BLOCK_SCORES) // vocabulary)

    def scaled_logits(self) -> Tensor:
        """(score - best) / temperature, [b, V] float32."""
        return torch.sub(self.values.float(), self.max_score).div_(self.temperature.float())


@dataclass(frozen=True, slots=True)
class SoftmaxStats:
    """What only a look at every token of a row tells, each [b, 1] float64; any number where nobody asks."""

    mass: Tensor  # the sum of exp(logits)
    entropy: Tensor  # of that distribution, in nats

    @classmethod
    def zeros(cls, scores: Scores) -> Self:
        """Numbers for rows that nobody asks about."""
        zeros = torch.zeros_like(scores.temperature)
        return cls(zeros, zeros)

    @classmethod
    def of(cls, scores: Scores) -> Self:
        """Those of `scores`, but the entropy."""
        blocks = [scores.take(rows).scaled_logits().exp_().sum(-1, keepdim=True) for rows in scores.row_blocks()]
        mass = torch.cat(blocks).double()
        return cls(mass, torch.zeros_like(mass))

    @classmethod
    def with_entropy(cls, scores: Scores) -> Self:
        """Those of `scores`."""
        blocks = [_mass_and_mean(scores.take(rows)) for rows in scores.row_blocks()]
        mass, mean = torch.cat(blocks).double().split(1, -1)
        return cls(mass, mass.log() - mean / mass)

    def take(self, rows: Tensor) -> "SoftmaxStats":
        """Those of some of the rows."""
        return SoftmaxStats(self.mass[rows], self.entropy[rows])


def _mass_and_mean(scores: Scores) -> Tensor:
    logits = scores.scaled_logits().clamp_(min=_LOG_ZERO)  # infinity times its mass, which is 0, is no number
    mass = logits.exp()
    return torch.stack([mass.sum(-1), torch.linalg.vecdot(mass, logits)], -1)


def argmax_lowest_id(values: Tensor) -> tuple[Tensor, Tensor]:
    """The highest of `values` [b, V] and its id, the lowest of equal ones, each [b, 1].

    As max does, but in two steps of which the first is vectorised.
    """
    vocabulary = values.shape[1]
    whole = vocabulary // _STRIDE
    maxima = values[:, : whole * _STRIDE].unflatten(1, (whole, _STRIDE)).amax(-1)
    if whole * _STRIDE < vocabulary:
        maxima = torch.cat([maxima, values[:, whole * _STRIDE :].amax(-1, keepdim=True)], -1)
    first = maxima.argmax(-1, keepdim=True) * _STRIDE
    ids = (first + torch.arange(_STRIDE, device=values.device)).clamp(max=vocabulary - 1)
    at = values.gather(1, ids).argmax(-1, keepdim=True)
    return maxima.amax(-1, keepdim=True), ids.gather(1, at)


def _sort_by_score(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort [b, C] float32 and their ids from the highest score, equal ones from the lowest id."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two are equal scores
    falling = ~(bits ^ ((bits >> 31) & _MAGNITUDE_MASK))
    keys = _sort((falling.long() << _ID_BITS) | ids)
    bits = ~(keys >> _ID_BITS).int()
    return (bits ^ ((bits >> 31) & _MAGNITUDE_MASK)).view(torch.float32), keys & _ID_MASK


def _sort(keys: Tensor) -> Tensor:
    """The rows of int64 `keys`, each sorted; numpy does it with vector instructions, much faster than torch."""
    return torch.from_numpy(np.sort(keys.numpy(), axis=-1)) if keys.is_cpu else keys.sort(-1).values


def _top_tokens(values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best of `values` [b, V] and their ids, sorted; which of equal ones at the end, is open."""
    if width <= _MAX_TOPK:
        values, ids = values.topk(min(width, values.shape[1]))
        return _sort_by_score(values.float(), ids)
    ids = torch.arange(values.shape[1], device=values.device).expand_as(values)
    values, ids = _sort_by_score(values.float(), ids)
    return values[:, :width].contiguous(), ids[:, :width].contiguous()


@dataclass(slots=True)
class Candidates:
    """What is left of the best tokens of each row, from the highest score, equal ones from the lowest id.

    The tokens that are left lie side by side. A row is closed when none is left outside the list.
    """

    logits: Tensor  # [b, C] float64, (score - best) / temperature
    ids: Tensor  # [b, C] int64
    kept: Tensor  # [b, C] bool; never a token that may have an equal outside the list
    mass: Tensor  # [b, C] float64, exp(logits) of what is left, else 0
    complete: Tensor  # [b, 1] bool
    exact: Tensor  # [b, 1] bool: the list was long enough for everything asked so far
    total_mass: Tensor  # [b, 1] float64, mass of all that is left; for an open row as the caller says
    entropy: Tensor  # [b, 1] float64, of an open row, as the caller says

    @classmethod
    def of(cls, scores: Scores, totals: SoftmaxStats, width: int) -> Self:
        """List the `width` best tokens of `scores`."""
        values, ids = _top_tokens(scores.values, width)
        lowest = values[:, -1:]
        whole = (lowest == -torch.inf) | (width >= scores.values.shape[1])
        left = ((values > lowest) | whole) & (values > -torch.inf)
        logits = (values.double() - scores.max_score) / scores.temperature
        sure = torch.ones_like(whole)
        listed = cls(logits, ids, left, logits.exp(), whole, sure, totals.mass, totals.entropy)
        listed._keep(left, whole)
        return listed

    def filter(self, filters: Filters) -> None:
        """Remove what the filters remove, each from what the one before has left."""
        if filters.top_k is not None:
            self._top_k(filters.top_k)
        if filters.top_p is not None:
            self._top_p(filters.top_p)
        if filters.typical_p is not None:
            self._typical_p(filters.typical_p)

    def _keep(self, kept: Tensor, closed: Tensor) -> None:
        self.kept = self.kept & kept
        self.mass = self.mass * self.kept
        self.complete = self.complete | closed
        self.total_mass = torch.where(self.complete, self.mass.sum(-1, keepdim=True), self.total_mass)

    def _top_k(self, k: Tensor) -> None:
        on = k > 0
        kth = self.logits.gather(1, (k - 1).clamp(0, self.ids.shape[1] - 1))
        self.exact &= ~on | self.complete | (self.kept.sum(-1, keepdim=True) >= k)
        self._keep(~on | (self.logits >= kth), on)

    def _top_p(self, p: Tensor) -> None:
        on = p < 1
        upto = self.mass.cumsum(-1)
        enough = p * self.total_mass
        kept = ~on | (pad(upto, (1, -1)) < enough)  # less than p lies above, so from here down is over 1 - p
        kept[:, 0] = True
        self.exact &= ~on | self.complete | (upto[:, -1:] >= enough)
        self._keep(kept, on)

    def _typical_p(self, p: Tensor) -> None:
        on = p < 1
        typical = self._mean_logit()
        away = torch.where(self.kept, (self.logits - typical).abs(), torch.inf).float()
        closest, at = _sort_by_score(-away, torch.arange(away.shape[1], device=away.device).expand_as(away))
        upto = self.mass.gather(1, at).cumsum(-1)
        enough = p * self.total_mass
        last = (upto < enough).sum(-1, keepdim=True).clamp(max=away.shape[1] - 1)
        farthest = -closest.gather(1, last)  # infinite if the list is too short
        outside = (typical - self.logits[:, -1:]).float()  # so far away is everything outside, or farther
        self.exact &= ~on | self.complete | (outside > farthest)
        self._keep(~on | (away <= farthest), on)

    def order_by_id(self) -> Tensor:
        """The places in the list from the lowest id to the highest, [b, C]."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return _sort((self.ids << _ID_BITS) | places) & _ID_MASK

    def _mean_logit(self) -> Tensor:
        """The logit of a token of exactly the expected surprise, [b, 1]."""
        inside = torch.linalg.vecdot(self.mass, self.logits.clamp(min=_LOG_ZERO))[:, None] / self.total_mass
        return torch.where(self.complete, inside, self.total_mass.log() - self.entropy)
