"""Changes of the scores before a token is chosen: penalties over whole rows, filters over the best tokens.

A filter never changes the order of tokens, so a list of the best ones is enough as long as it reaches far
enough down: `Remaining.sure` says so for each row, and a row that is not sure is done again with a list of
the whole vocabulary. Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tgis.messages import Sampling

_COLDEST = 1e-30  # a temperature below it would divide to infinity; the best token wins long before
_LARGEST = 1e30  # a factor stops here, so that what it boosts stays a number
_LOG_ZERO = -1e4  # far below the logarithm of any float but zero
_MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 but the sign
_ID_BITS = 32  # of a key to sort by, below the score


def column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One parameter of all rows, [b, 1]."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None]


class Penalties:
    """Minimum length, length penalty and repetition penalty of some rows, in this order, in place."""

    def __init__(self, rows: list[Sampling], places: list[int], eos: Tensor) -> None:
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
        self._repeats_in_batch = torch.tensor([places[i] for i in repeats], dtype=torch.int64, device=device)
        self._repetition = column([rows[i].repetition_penalty for i in repeats], torch.float32, device)

    def apply(self, scores: Tensor, context: Tensor, generated: Tensor) -> None:
        """Change `scores` [b, V] float32; `context` [B, W] int64, `generated` [b, 1] float64."""
        if len(self._ends):
            self._change_eos(scores, generated[self._ends[:, 0]])
        if len(self._repeats):
            self._penalise_repetition(scores, context[self._repeats_in_batch])

    def _change_eos(self, scores: Tensor, generated: Tensor) -> None:
        old = scores[self._ends, self._eos]  # [e, ids]
        past = generated - self._start
        factor = self._decay.pow(past.clamp(min=0)).clamp(max=_LARGEST)
        boosted = (old + old.double().abs() * (factor - 1)).float()
        new = torch.where(old.isfinite(), boosted, old)
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
    def of(cls, rows: list[Sampling], vocabulary: int, device: torch.device) -> Self:
        """Those of `rows`; a greedy row has none, nor does a top_k of the whole vocabulary filter."""
        rows = [Sampling(temperature=1.0) if row.greedy else row for row in rows]
        return cls(
            column([max(row.temperature, _COLDEST) for row in rows], torch.float64, device),
            _used([row.top_k if row.top_k < vocabulary else 0 for row in rows], 0, torch.int64, device),
            _used([row.top_p for row in rows], 1.0, torch.float64, device),
            _used([row.typical_p for row in rows], 1.0, torch.float64, device),
        )

    def take(self, rows: Tensor) -> "Filters":
        """Those of some of the rows."""
        filters = (self.top_k, self.top_p, self.typical_p)
        return Filters(self.temperature[rows], *(None if each is None else each[rows] for each in filters))


def _used(values: list[float], off: float, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    return column(values, dtype, device) if any(value != off for value in values) else None


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of some rows, penalties included, and what puts them in proportion."""

    values: Tensor  # [b, V] float32
    best: Tensor  # [b, 1] float32, the highest of each row; not finite if the row cannot be used
    temperature: Tensor  # [b, 1] float64

    def take(self, rows: Tensor) -> "Scores":
        """Those of some of the rows."""
        return Scores(self.values[rows], self.best[rows], self.temperature[rows])

    def logits(self) -> Tensor:
        """(score - best) / temperature, [b, V] float32."""
        return torch.sub(self.values, self.best).div_(self.temperature.float())


@dataclass(frozen=True, slots=True)
class Totals:
    """What only a look at every token of a row tells, each [b, 1] float64; any number where nobody asks."""

    mass: Tensor  # the sum of exp(logits)
    entropy: Tensor  # of that distribution, in nats

    @classmethod
    def of(cls, scores: Scores) -> Self:
        """Those of `scores`."""
        logits = scores.logits().clamp_(min=_LOG_ZERO)  # infinity times its mass, which is 0, is no number
        mass = logits.exp()
        total = mass.sum(-1, keepdim=True).double()
        return cls(total, total.log() - torch.linalg.vecdot(mass, logits)[:, None] / total)

    @classmethod
    def unasked(cls, scores: Scores) -> Self:
        """Numbers for rows that nobody asks about."""
        zeros = torch.zeros_like(scores.temperature)
        return cls(zeros, zeros)

    def take(self, rows: Tensor) -> "Totals":
        """Those of some of the rows."""
        return Totals(self.mass[rows], self.entropy[rows])


def _sorted(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort [b, C] float32 and their ids from the highest score, equal ones from the lowest id."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two are equal scores
    falling = ~(bits ^ ((bits >> 31) & _MAGNITUDE))
    keys = (falling.long() << _ID_BITS) | ids
    # numpy sorts with vector instructions, in an eighth of torch's time
    keys = torch.from_numpy(np.sort(keys.numpy(), axis=-1)) if keys.is_cpu else keys.sort(-1).values
    bits = ~(keys >> _ID_BITS).int()
    return (bits ^ ((bits >> 31) & _MAGNITUDE)).view(torch.float32), keys & ((1 << _ID_BITS) - 1)


@dataclass(slots=True)
class Remaining:
    """What is left of the best tokens of each row, from the highest score, equal ones from the lowest id.

    The tokens that are left lie side by side. A row is closed when none is left outside the list.
    """

    logits: Tensor  # [b, C] float64, (score - best) / temperature
    ids: Tensor  # [b, C] int64
    left: Tensor  # [b, C] bool; never a token that may have an equal outside the list
    mass: Tensor  # [b, C] float64, exp(logits) of what is left, else 0
    closed: Tensor  # [b, 1] bool
    sure: Tensor  # [b, 1] bool: the list was long enough for everything asked so far
    total: Tensor  # [b, 1] float64, mass of all that is left; for an open row as the caller says
    entropy: Tensor  # [b, 1] float64, of an open row, as the caller says
    vocabulary: int

    @classmethod
    def of(cls, scores: Scores, totals: Totals, width: int) -> Self:
        """List the `width` best tokens of `scores`."""
        values, vocabulary = scores.values, scores.values.shape[1]
        if width < vocabulary:
            values, ids = values.topk(width)
        else:
            ids = torch.arange(vocabulary, device=values.device).expand_as(values)
        values, ids = _sorted(values, ids)
        lowest = values[:, -1:]
        whole = (lowest == -torch.inf) | (width >= vocabulary)
        left = ((values > lowest) | whole) & (values > -torch.inf)
        logits = (values.double() - scores.best) / scores.temperature
        sure = torch.ones_like(whole)
        listed = cls(logits, ids, left, logits.exp(), whole, sure, totals.mass, totals.entropy, vocabulary)
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
        self.left = self.left & kept
        self.mass = self.mass * self.left
        self.closed = self.closed | closed
        self.total = torch.where(self.closed, self.mass.sum(-1, keepdim=True), self.total)

    def _top_k(self, k: Tensor) -> None:
        on = k > 0
        kth = self.logits.gather(1, (k - 1).clamp(0, self.ids.shape[1] - 1))
        self.sure &= ~on | self.closed | (self.left.sum(-1, keepdim=True) >= k)
        self._keep(~on | (self.logits >= kth), on)

    def _top_p(self, p: Tensor) -> None:
        on = p < 1
        upto = self.mass.cumsum(-1)
        enough = p * self.total
        kept = ~on | (pad(upto, (1, -1)) < enough)  # less than p lies above, so from here down is over 1 - p
        kept[:, 0] = True
        self.sure &= ~on | self.closed | (upto[:, -1:] >= enough)
        self._keep(kept, on)

    def _typical_p(self, p: Tensor) -> None:
        on = p < 1
        typical = self._mean_logit()
        away = torch.where(self.left, (self.logits - typical).abs(), torch.inf).float()
        closest, at = _sorted(-away, torch.arange(away.shape[1], device=away.device).expand_as(away))
        upto = self.mass.gather(1, at).cumsum(-1)
        enough = p * self.total
        last = (upto < enough).sum(-1, keepdim=True).clamp(max=away.shape[1] - 1)
        farthest = -closest.gather(1, last)  # infinite if the list is too short
        outside = (typical - self.logits[:, -1:]).float()  # so far away is everything outside, or farther
        self.sure &= ~on | self.closed | (outside > farthest)
        self._keep(~on | (away <= farthest), on)

    def places_by_id(self) -> Tensor:
        """The places in the list from the lowest id to the highest, [b, C]."""
        if self.ids.shape[1] < self.vocabulary:
            return self.ids.argsort(-1)
        places = torch.arange(self.vocabulary, device=self.ids.device).expand_as(self.ids)
        return torch.empty_like(self.ids).scatter_(1, self.ids, places)  # all ids: the inverse, without sorting

    def _mean_logit(self) -> Tensor:
        """The logit of a token of exactly the expected surprise, [b, 1]."""
        inside = torch.linalg.vecdot(self.mass, self.logits.clamp(min=_LOG_ZERO))[:, None] / self.total
        return torch.where(self.closed, inside, self.total.log() - self.entropy)
