"""Temperature and the filters top_k, top_p and typical_p, which see only the best candidates of a row.

No filter changes the order of tokens, so a list of the best ones is enough as long as it is long enough:
`Candidates.exact` says so for each row. Nothing here waits for the device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tgis.engines.host_memory import to_device
from tgis.ipc.request import SamplingParams

MIN_DIVISOR = 1e-30  # a lower temperature or repetition penalty would divide to infinity
_LOG_ZERO = -1e4  # far below the logarithm of any float but zero
_MAGNITUDE_MASK = 0x7FFFFFFF  # the bits of a float32 but the sign
_ID_BITS = 32  # bits of the token id below the score in a sort key
_ID_MASK = (1 << _ID_BITS) - 1
_LIST_STEP, _MAX_LIST = 16, 256  # lengths of the lists that are tried first
LONG_LIST = 1024  # tokens; topk of so many takes a tenth of the time of a full sort of 50,000
_TIE_MARGIN = 12  # extra candidates of a list, which may tie with the last one needed
_CPU_BLOCK_SCORES, _GPU_BLOCK_SCORES = 1 << 19, 1 << 24  # scores per block: what fits the cache, or at least the memory


def column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter of all rows as a column [b, 1]."""
    return to_device(values, dtype, device)[:, None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors with a row for each of some sequences, and what they have in common."""

    def take(self, rows: Tensor | slice) -> Self:
        """A copy with some of the rows."""
        return type(self)(*(_take(getattr(self, field.name), rows) for field in fields(self)))


def _take(value: Any, rows: Tensor | slice) -> Any:
    return value[rows] if isinstance(value, Tensor) else value.take(rows) if isinstance(value, Rows) else value


@dataclass(frozen=True, slots=True)
class Filters(Rows):
    """Temperature and filters of some rows, each [b, 1]; None where no row has the filter."""

    temperature: Tensor  # float64; 1 for a greedy row
    top_k: Tensor | None  # int64; 0 is off
    top_p: Tensor | None  # float64; 1 is off
    typical_p: Tensor | None  # float64; 1 is off

    @classmethod
    def of(cls, params: list[SamplingParams], vocab_size: int, device: torch.device) -> Self:
        """The filters of rows with these parameters: a greedy row has none; a top_k of the whole vocabulary is off."""
        params = [SamplingParams(temperature=1.0) if row.greedy else row for row in params]
        return cls(
            column([max(row.temperature, MIN_DIVISOR) for row in params], torch.float64, device),
            _column_if_used([row.top_k if row.top_k < vocab_size else 0 for row in params], 0, torch.int64, device),
            _column_if_used([row.top_p for row in params], 1.0, torch.float64, device),
            _column_if_used([row.typical_p for row in params], 1.0, torch.float64, device),
        )


def _column_if_used(values: list[float], off: float, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    return column(values, dtype, device) if any(value != off for value in values) else None


@dataclass(frozen=True, slots=True)
class Scores(Rows):
    """The scores of some rows after penalties, and what scales them."""

    values: Tensor  # [b, V] any float
    max_score: Tensor  # [b, 1] float32; not finite if the row is unusable
    temperature: Tensor  # [b, 1] float64

    def row_blocks(self) -> list[slice]:
        """Slices of the rows, so that intermediate results for one of them have a bounded size."""
        size = max(1, (_CPU_BLOCK_SCORES if self.values.is_cpu else _GPU_BLOCK_SCORES) // self.values.shape[1])
        return [slice(start, start + size) for start in range(0, len(self.values), size)]

    def scaled_logits(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(score - max) / temperature, [b, V], in `dtype`."""
        return torch.sub(self.values.to(dtype), self.max_score).div_(self.temperature.to(dtype))


@dataclass(frozen=True, slots=True)
class SoftmaxStats(Rows):
    """Statistics over the whole vocabulary, each [b, 1] float64; any number where nobody needs them."""

    mass: Tensor  # the sum of exp(logits)
    entropy: Tensor  # entropy of the distribution, in nats

    @classmethod
    def zeros(cls, scores: Scores) -> Self:
        """Placeholders for rows that need no statistics."""
        zeros = torch.zeros_like(scores.temperature)
        return cls(zeros, zeros)

    @classmethod
    def of(cls, scores: Scores) -> Self:
        """Both statistics, which takes about twice as long as the mass alone."""
        blocks = [_mass_and_mean(scores.take(rows)) for rows in scores.row_blocks()]
        mass, mean = torch.cat(blocks).double().split(1, -1)
        return cls(mass, mass.log() - mean / mass)


def softmax_mass(scores: Scores) -> Tensor:
    """The sum of exp(logits) over the whole vocabulary, [b, 1] float64."""
    blocks = [_sums(scores.take(rows).scaled_logits().exp_()) for rows in scores.row_blocks()]
    return torch.cat(blocks)[:, None].double()


def _mass_and_mean(scores: Scores) -> Tensor:
    logits = scores.scaled_logits().clamp_(min=_LOG_ZERO)  # -inf times its mass, 0, would be NaN
    mass = logits.exp()
    return torch.stack([_sums(mass), _sums(logits.mul_(mass))], -1)


def _sums(values: Tensor) -> Tensor:
    """The sums of rows, in an order that does not depend on their number: threads of PyTorch share a single sum."""
    rows = len(values)
    return values.expand(max(rows, 2), -1).sum(-1)[:rows]


def _sort_by_score(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort float32 scores [b, C] and their ids by descending score, equal scores by ascending id."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two are equal scores
    descending = ~(bits ^ ((bits >> 31) & _MAGNITUDE_MASK))
    keys = (descending.long() << _ID_BITS) | ids
    # On CPUs numpy uses vector instructions and is much faster than torch.
    keys = torch.from_numpy(np.sort(keys.numpy(), axis=-1)) if keys.is_cpu else keys.sort(-1).values
    bits = ~(keys >> _ID_BITS).int()
    return (bits ^ ((bits >> 31) & _MAGNITUDE_MASK)).view(torch.float32), keys & _ID_MASK


def list_length(needed: Iterable[int], vocab_size: int) -> int:
    """The length of a list of the best tokens in which rows probably find as many as they need. Rows that need more
    than a list is worth do not count; the whole vocabulary if there are no others.
    """
    lengths = [-(-(count + _TIE_MARGIN) // _LIST_STEP) * _LIST_STEP for count in needed]
    return min(max((length for length in lengths if length <= _MAX_LIST), default=vocab_size), vocab_size)


def _top_tokens(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of `values` [b, V] and their ids, sorted; of equal ones at the end an arbitrary choice."""
    if count <= LONG_LIST:
        values, ids = values.topk(min(count, values.shape[1]))
        return _sort_by_score(values.float(), ids)
    ids = torch.arange(values.shape[1], device=values.device).expand_as(values)
    values, ids = _sort_by_score(values.float(), ids)
    return values[:, :count].contiguous(), ids[:, :count].contiguous()


def _possibly_any(values: Tensor) -> bool:
    """Whether any is true; always on a device that would have to be waited for."""
    return not values.is_cpu or bool(values.any())


def first_tokens(scores: Scores, count: int, nth: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the `count` best tokens and their ids, sorted. Of equal ones at the end they are those with the
    lowest ids, except on CPUs where these are worse than the `nth` best [b, 1].
    """
    values, ids = scores.values.topk(count)
    lowest = values[:, -1:]
    is_needed = values.gather(1, (nth - 1).clamp(min=0)) == lowest
    vocabulary = torch.arange(scores.values.shape[1], dtype=torch.int32, device=ids.device)
    for rows in scores.row_blocks():
        if _possibly_any(is_needed[rows]):
            equal = torch.where(scores.values[rows] == lowest[rows], vocabulary, vocabulary[-1])
            lowest_ids = equal.topk(count, largest=False).values.long()
            index = torch.arange(count, device=ids.device) - (values[rows] > lowest[rows]).sum(-1, keepdim=True)
            ids[rows] = torch.where(index < 0, ids[rows], lowest_ids.gather(1, index.clamp(min=0)))
    return _sort_by_score(values.float(), ids)


@dataclass(slots=True)
class Candidates:
    """The best tokens of each row by descending score, equal ones by ascending id, and which of them the filters kept.

    Kept tokens are adjacent. A row is complete when no token outside the list is kept.
    """

    logits: Tensor  # [b, C] float64, (score - max) / temperature
    ids: Tensor  # [b, C] int64
    kept: Tensor  # [b, C] bool; never a token that may have an equal outside the list
    mass: Tensor  # [b, C] float64, exp(logits) of kept tokens, else 0
    complete: Tensor  # [b, 1] bool
    exact: Tensor  # [b, 1] bool: the list was long enough for every filter so far
    total_mass: Tensor  # [b, 1] float64, of all kept tokens; for an incomplete row given by the caller
    entropy: Tensor  # [b, 1] float64, of the distribution; used for incomplete rows only

    @classmethod
    def of(cls, scores: Scores, stats: SoftmaxStats, count: int) -> Self:
        """The `count` best tokens of `scores`."""
        values, ids = _top_tokens(scores.values, count)
        lowest = values[:, -1:]
        complete = (lowest == -torch.inf) | (count >= scores.values.shape[1])
        kept = ((values > lowest) | complete) & (values > -torch.inf)
        logits = (values.double() - scores.max_score) / scores.temperature
        exact = torch.ones_like(complete)
        candidates = cls(logits, ids, kept, logits.exp(), complete, exact, stats.mass, stats.entropy)
        candidates._keep(kept, complete)
        return candidates

    def filter(self, filters: Filters) -> None:
        """Apply the filters, each to what the one before has kept."""
        if filters.top_k is not None:
            self._top_k(filters.top_k)
        if filters.top_p is not None:
            self._top_p(filters.top_p)
        if filters.typical_p is not None:
            self._typical_p(filters.typical_p)

    def _keep(self, kept: Tensor, complete: Tensor) -> None:
        self.kept = self.kept & kept
        self.mass = self.mass * self.kept
        self.complete = self.complete | complete
        self.total_mass = torch.where(self.complete, self.mass.sum(-1, keepdim=True), self.total_mass)

    def _top_k(self, k: Tensor) -> None:
        on = k > 0
        kth = self.logits.gather(1, (k - 1).clamp(0, self.ids.shape[1] - 1))
        self.exact &= ~on | self.complete | (self.kept.sum(-1, keepdim=True) >= k)
        self._keep(~on | (self.logits >= kth), on)

    def _top_p(self, p: Tensor) -> None:
        on = p < 1
        cumulative = self.mass.cumsum(-1)
        threshold = p * self.total_mass
        kept = ~on | (pad(cumulative, (1, -1)) < threshold)  # the mass above is less than p: the rest exceeds 1 - p
        kept[:, 0] = True
        self.exact &= ~on | self.complete | (cumulative[:, -1:] >= threshold)
        self._keep(kept, on)

    def _typical_p(self, p: Tensor) -> None:
        on = p < 1
        typical = self._expected_logit()
        distance = torch.where(self.kept, (self.logits - typical).abs(), torch.inf).float()
        closest, at = _sort_by_score(
            -distance, torch.arange(distance.shape[1], device=distance.device).expand_as(distance)
        )
        cumulative = self.mass.gather(1, at).cumsum(-1)
        threshold = p * self.total_mass
        last = (cumulative < threshold).sum(-1, keepdim=True).clamp(max=distance.shape[1] - 1)
        farthest = -closest.gather(1, last)  # infinite if the list is too short
        outside = (typical - self.logits[:, -1:]).float()  # every token outside the list is at least this far away
        self.exact &= ~on | self.complete | (outside > farthest)
        self._keep(~on | (distance <= farthest), on)

    def _expected_logit(self) -> Tensor:
        """The logit of a token whose surprise is the entropy, [b, 1]."""
        inside = _sums(self.mass * self.logits.clamp(min=_LOG_ZERO))[:, None] / self.total_mass
        return torch.where(self.complete, inside, self.total_mass.log() - self.entropy)
