"""Who may leave the waiting room for the next step, and why the others may not."""

import math
from collections.abc import Iterable
from typing import Protocol

from tgis.batcher.allowance import Allowance
from tgis.batcher.block_manager import Pager
from tgis.batcher.granular import Forecast
from tgis.batcher.memory_model import Limits, Prefill, area
from tgis.batcher.sequence import Sequence
from tgis.batcher.waiting_queue import OVERTAKERS, OVERTAKING_SECONDS
from tgis.ipc.messages import Admissions
from tgis.ipc.snapshot import Refusal

_KEYS_TO_PASS = 256  # that are made in one step for rows that would overtake: 4096 tokens, a fifth of a millisecond


class Door(Protocol):
    """The rules by which rows join a batch."""

    def refusal(self, row: Sequence) -> Refusal | None:
        """Why this row cannot join those already let in; None if it can."""

    def admit(self, row: Sequence) -> None:
        """Let a row in that was not refused."""


def choose(
    waiting: Iterable[Sequence], door: Door, slots: int, counts: Admissions
) -> tuple[list[Sequence], Refusal | None]:
    """Rows that join, in order, and why the first of the others could not, if there are any.

    After one that is refused only those may join who were queued within a second of it.
    """
    chosen: list[Sequence] = []
    reason: Refusal | None = None
    cutoff, last = math.inf, math.inf
    for place, row in enumerate(waiting):
        if len(chosen) == slots:
            return chosen, reason or Refusal.BATCH_SIZE
        if chosen and row.trial != chosen[0].trial:
            return chosen, reason or Refusal.TRIAL
        if row.queued_at > cutoff or place > last:
            break
        refusal = door.refusal(row)
        if refusal is None:
            door.admit(row)
            chosen.append(row)
            counts.queue_jumps += cutoff < math.inf
        else:
            reason = reason or refusal
            cutoff = min(cutoff, row.queued_at + OVERTAKING_SECONDS)
            last = min(last, place + OVERTAKERS)
            if row.trial:
                break  # nobody overtakes a row on trial
    return chosen, reason


class WholeDoor:
    """Rows join by a prefill of whole prompts, while the running rows stand still."""

    def __init__(self, limits: Limits, allowance: Allowance, running: list[Sequence], counts: Admissions) -> None:
        self._limits = limits
        self._allowance = allowance
        self._counts = counts
        lengths = [(len(row.tokens), row.final_length - len(row.tokens)) for row in running]
        self._forecast = Forecast(lengths, limits.padded, allowance.context)
        self._running, self._prefill = Prefill(limits.padded), Prefill(limits.padded)
        for length, _ in lengths:
            self._running.add(length)
        self._alone = not running

    def refusal(self, row: Sequence) -> Refusal | None:
        """The batch as the prefill leaves it must stay within memory, the prefill itself within its bounds."""
        if self._alone:
            return None  # that it fits is known since the start
        length = len(row.tokens)
        if not self._forecast.fits(length + 1, row.final_length - length - 1):
            return Refusal.MEMORY
        return self._prefill_refusal(length)

    def admit(self, row: Sequence) -> None:
        """Count it into the batch and the prefill."""
        length = len(row.tokens)
        rest = row.final_length - length
        self._counts.granular_additions += not (self._alone or self._forecast.fits_at_worst(length + 1, rest - 1))
        self._alone = False
        self._forecast.add(length + 1, rest - 1)
        self._prefill.add(length)

    def _prefill_refusal(self, length: int) -> Refusal | None:
        wider = self._prefill.with_row(length)
        too_heavy = self._weight_during(wider) > self._limits.memory.weight_limit
        if too_heavy or (wider.count > 1 and wider.tokens > self._allowance.prefill_tokens):
            self._counts.prefill_weight_exceeded += 1
            return Refusal.PREFILL
        if wider.padding > self._limits.max_padding:
            self._counts.prefill_padding_exceeded += 1
            return Refusal.PADDING
        return None

    def _weight_during(self, prefill: Prefill) -> int:
        """Weight of the batch with the new rows in it, and of what their prefill takes beyond keeping them."""
        memory, padded = self._limits.memory, self._limits.padded
        gradient = memory.gradient(padded)
        alone = memory.prefill(prefill.count, prefill.longest, prefill.total, padded)
        beyond = max(0, alone - int(gradient * prefill.tokens))
        return int(gradient * self._running.tokens_beside(prefill)) + beyond


class BlockDoor:
    """Rows join an engine with KV blocks on what they need now; what they grow by is taken from the youngest."""

    def __init__(self, pager: Pager, usable: int, running: list[Sequence], budget: int, counts: Admissions) -> None:
        """At most `usable` blocks are to be in use; each running row may soon need one."""
        catching = [row for row in running if not row.decoding]
        promised = sum(pager.missing(row, len(row.tokens) + 1) for row in catching)
        free = min(pager.pool.available, usable - pager.pool.used)
        self._pager = pager
        self._room = free - promised - len(running)
        self._worst = usable - sum(pager.blocks_for(row.final_length) for row in running)
        self._budget = budget - sum(row.pending for row in catching[1:])  # the first has its own share
        self._catching = catching
        self._alone = not running
        self._passing = False  # whether rows are looked at that would overtake another
        self._keys = pager.keys_made
        self._counts = counts

    def refusal(self, row: Sequence) -> Refusal | None:
        """There must be blocks for its prompt, and tokens left in the step to start it."""
        if self._alone:
            return None  # that it fits is known since the start
        reason = self._reason(row)
        self._passing |= reason is not None
        return reason

    def admit(self, row: Sequence) -> None:
        """Count it into the batch and the step."""
        self._counts.granular_additions += not self._alone and self._pager.blocks_for(row.final_length) > self._worst
        self._alone = False
        self._worst -= self._pager.blocks_for(row.final_length)
        self._room -= self._pager.needed(row) + 1
        self._pager.join(row, self._counts)
        self._budget -= row.pending if self._catching else 0
        self._catching.append(row)

    def _reason(self, row: Sequence) -> Refusal | None:
        if self._room <= 0:
            return Refusal.MEMORY
        if self._budget <= 0:
            self._counts.prefill_weight_exceeded += 1
            return Refusal.PREFILL
        if self._passing and self._pager.keys_made - self._keys > _KEYS_TO_PASS:
            return Refusal.MEMORY  # what it needs would take too long to find out
        if any(self._pager.follows(row, other) for other in self._catching):
            return Refusal.PREFIX
        if self._pager.exceeds(row, self._room) or self._pager.needed(row) >= self._room:
            return Refusal.MEMORY
        return None


def context_peak(rows: list[Sequence], padded: bool) -> int:
    """The most tokens of context that these rows will come to, padding included; those not decoding yet in full."""
    catching = sum(row.final_length for row in rows if not row.decoding)
    decoding = [(len(row.tokens), row.remaining) for row in rows if row.decoding]
    return catching + Forecast(decoding, padded, 0).peak()


def context_now(rows: Iterable[Sequence], padded: bool) -> int:
    """Tokens of context of these rows, padding included."""
    return area([len(row.tokens) for row in rows], padded)
