"""Who may leave the waiting room for the next step, and why the others may not."""

import math
from collections.abc import Iterable
from typing import Protocol

from tgis.batcher.allowance import CapacityLimits
from tgis.batcher.block_manager import BlockManager
from tgis.batcher.granular import PeakEstimator
from tgis.batcher.memory_model import BatchLimits, BatchShape, padded_tokens
from tgis.batcher.sequence import Sequence
from tgis.batcher.waiting_queue import MAX_OVERTAKERS, OVERTAKING_WINDOW_SECONDS
from tgis.ipc.messages import AdmissionCounters
from tgis.ipc.snapshot import WaitReason

_MAX_HASHES_TO_OVERTAKE = (
    256  # that are made in one step for rows that would overtake: 4096 tokens, a fifth of a millisecond
)


class Admission(Protocol):
    """The rules by which rows join a batch."""

    def wait_reason(self, row: Sequence) -> WaitReason | None:
        """Why this row cannot join those already let in; None if it can."""

    def admit(self, seq: Sequence) -> None:
        """Let a row in that was not refused."""


def select_waiting(
    waiting: Iterable[Sequence], admission: Admission, max_seqs: int, counters: AdmissionCounters
) -> tuple[list[Sequence], WaitReason | None]:
    """Rows that join, in order, and why the first of the others could not, if there are any.

    After one that is refused only those may join who were queued within a second of it.
    """
    selected: list[Sequence] = []
    reason: WaitReason | None = None
    cutoff, last_position = math.inf, math.inf
    for position, row in enumerate(waiting):
        if len(selected) == max_seqs:
            return selected, reason or WaitReason.BATCH_SIZE
        if selected and row.retry_group != selected[0].retry_group:
            return selected, reason or WaitReason.RETRY
        if row.arrival_time > cutoff or position > last_position:
            break
        wait_reason = admission.wait_reason(row)
        if wait_reason is None:
            admission.admit(row)
            selected.append(row)
            counters.queue_jumps += cutoff < math.inf
        else:
            reason = reason or wait_reason
            cutoff = min(cutoff, row.arrival_time + OVERTAKING_WINDOW_SECONDS)
            last_position = min(last_position, position + MAX_OVERTAKERS)
            if row.retry_group:
                break  # nobody overtakes a row on trial
    return selected, reason


class PaddedAdmission:
    """Rows join by a prefill of whole prompts, while the running rows stand still."""

    def __init__(
        self, limits: BatchLimits, capacity: CapacityLimits, running: list[Sequence], counters: AdmissionCounters
    ) -> None:
        self._limits = limits
        self._capacity = capacity
        self._counters = counters
        lengths = [(len(row.tokens), row.max_length - len(row.tokens)) for row in running]
        self._peak_estimator = PeakEstimator(lengths, limits.padded, capacity.context_tokens)
        self._running, self._prefill = BatchShape(limits.padded), BatchShape(limits.padded)
        for length, _ in lengths:
            self._running.add(length)
        self._alone = not running

    def wait_reason(self, row: Sequence) -> WaitReason | None:
        """The batch as the prefill leaves it must stay within memory, the prefill itself within its bounds."""
        if self._alone:
            return None  # that it fits is known since the start
        length = len(row.tokens)
        if not self._peak_estimator.fits(length + 1, row.max_length - length - 1):
            return WaitReason.MEMORY
        return self._prefill_wait_reason(length)

    def admit(self, row: Sequence) -> None:
        """Count it into the batch and the prefill."""
        length = len(row.tokens)
        rest = row.max_length - length
        self._counters.granular_additions += not (
            self._alone or self._peak_estimator.fits_worst_case(length + 1, rest - 1)
        )
        self._alone = False
        self._peak_estimator.add(length + 1, rest - 1)
        self._prefill.add(length)

    def _prefill_wait_reason(self, length: int) -> WaitReason | None:
        wider = self._prefill.with_seq(length)
        too_heavy = self._prefill_memory(wider) > self._limits.memory.weight_limit
        if too_heavy or (wider.num_seqs > 1 and wider.padded_tokens > self._capacity.prefill_tokens):
            self._counters.prefill_weight_exceeded += 1
            return WaitReason.PREFILL_SIZE
        if wider.padding_ratio > self._limits.max_prefill_padding:
            self._counters.prefill_padding_exceeded += 1
            return WaitReason.PREFILL_PADDING
        return None

    def _prefill_memory(self, prefill: BatchShape) -> int:
        """Weight of the batch with the new rows in it, and of what their prefill takes beyond keeping them."""
        memory, padded = self._limits.memory, self._limits.padded
        gradient = memory.cost_per_token(padded)
        alone = memory.prefill_cost(prefill.num_seqs, prefill.max_length, prefill.total_tokens, padded)
        beyond = max(0, alone - int(gradient * prefill.padded_tokens))
        return int(gradient * self._running.combined_tokens(prefill)) + beyond


class PagedAdmission:
    """Rows join an engine with KV blocks on what they need now; what they grow by is taken from the youngest."""

    def __init__(
        self,
        block_manager: BlockManager,
        max_blocks: int,
        running: list[Sequence],
        budget: int,
        counters: AdmissionCounters,
    ) -> None:
        """At most `usable` blocks are to be in use; each running row may soon need one."""
        prefilling = [row for row in running if not row.decoding]
        promised_blocks = sum(block_manager.missing_blocks(row, len(row.tokens) + 1) for row in prefilling)
        free = min(block_manager.pool.num_available, max_blocks - block_manager.pool.num_used)
        self._block_manager = block_manager
        self._free_blocks = free - promised_blocks - len(running)
        self._worst_case_free_blocks = max_blocks - sum(block_manager.blocks_for(row.max_length) for row in running)
        self._budget = budget - sum(row.num_uncomputed_tokens for row in prefilling[1:])  # the first has its own share
        self._prefilling = prefilling
        self._alone = not running
        self._overtaking = False  # whether rows are looked at that would overtake another
        self._num_hashed_before = block_manager.num_hashed_blocks
        self._counters = counters

    def wait_reason(self, row: Sequence) -> WaitReason | None:
        """There must be blocks for its prompt, and tokens left in the step to start it."""
        if self._alone:
            return None  # that it fits is known since the start
        reason = self._reason(row)
        self._overtaking |= reason is not None
        return reason

    def admit(self, row: Sequence) -> None:
        """Count it into the batch and the step."""
        self._counters.granular_additions += (
            not self._alone and self._block_manager.blocks_for(row.max_length) > self._worst_case_free_blocks
        )
        self._alone = False
        self._worst_case_free_blocks -= self._block_manager.blocks_for(row.max_length)
        self._free_blocks -= self._block_manager.new_blocks_needed(row) + 1
        self._block_manager.attach_cached_prefix(row, self._counters)
        self._budget -= row.num_uncomputed_tokens if self._prefilling else 0
        self._prefilling.append(row)

    def _reason(self, row: Sequence) -> WaitReason | None:
        if self._free_blocks <= 0:
            return WaitReason.MEMORY
        if self._budget <= 0:
            self._counters.prefill_weight_exceeded += 1
            return WaitReason.PREFILL_SIZE
        if (
            self._overtaking
            and self._block_manager.num_hashed_blocks - self._num_hashed_before > _MAX_HASHES_TO_OVERTAKE
        ):
            return WaitReason.MEMORY  # what it needs would take too long to find out
        if any(self._block_manager.shares_inflight_prefix(row, other) for other in self._prefilling):
            return WaitReason.PREFIX_CACHE
        if (
            self._block_manager.needs_at_least(row, self._free_blocks)
            or self._block_manager.new_blocks_needed(row) >= self._free_blocks
        ):
            return WaitReason.MEMORY
        return None


def peak_context_tokens(rows: list[Sequence], padded: bool) -> int:
    """The most tokens of context that these rows will come to, padding included; those not decoding yet in full."""
    prefilling = sum(row.max_length for row in rows if not row.decoding)
    decoding = [(len(row.tokens), row.num_remaining_tokens) for row in rows if row.decoding]
    return prefilling + PeakEstimator(decoding, padded, 0).peak()


def current_context_tokens(rows: Iterable[Sequence], padded: bool) -> int:
    """Tokens of context of these rows, padding included."""
    return padded_tokens([len(row.tokens) for row in rows], padded)
