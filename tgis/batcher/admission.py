"""Selects the waiting requests that join the next step, and finds why the others have to wait."""

import math
from collections.abc import Iterable

from tgis.batcher.block_manager import BlockManager
from tgis.batcher.capacity import BatchLimits, CapacityLimits, PeakEstimator, padded_tokens
from tgis.batcher.sequence import Sequence
from tgis.batcher.waiting_queue import MAX_OVERTAKERS, OVERTAKING_WINDOW_SECONDS
from tgis.ipc.messages import BatcherCounters, WaitReason

_MAX_HASHES_TO_OVERTAKE = 256  # blocks hashed in one step for sequences that would overtake: about 0.2 ms
MAX_CHUNKS = 8  # prompts that share a step's tokens; with one, the second long prompt would keep short ones waiting
MAX_ADAPTER_RANKS = 1024  # sum of the ranks of a step's LoRA adapters: each token is multiplied by all of them


def select_waiting(
    waiting: Iterable[Sequence],
    running: Iterable[Sequence],
    admission: "PaddedAdmission | PagedAdmission",
    max_seqs: int,
    counters: BatcherCounters,
) -> tuple[list[Sequence], WaitReason | None]:
    """The sequences that join, in order, and why the first of the others has to wait, if there are any.

    A sequence that has to wait may be overtaken only by sequences that arrived within a second of it, before or after,
    since sequences of other clients behind it may be much older.
    """
    ranks = dict(map(_adapter_rank, running))
    selected: list[Sequence] = []
    reason: WaitReason | None = None
    earliest, latest, last_position = -math.inf, math.inf, math.inf
    for position, seq in enumerate(waiting):
        if len(selected) == max_seqs:
            return selected, reason or WaitReason.BATCH_SIZE
        if selected and seq.retry_group != selected[0].retry_group:
            return selected, reason or WaitReason.RETRY
        if not earliest <= seq.arrival_time <= latest or position > last_position:
            break
        version, rank = _adapter_rank(seq)
        fits = version in ranks or sum(ranks.values()) + rank <= MAX_ADAPTER_RANKS
        wait_reason = admission.wait_reason(seq) if fits else WaitReason.ADAPTER_RANKS
        if wait_reason is None:
            admission.admit(seq)
            ranks[version] = rank
            selected.append(seq)
            counters.queue_jumps += reason is not None
        else:
            reason = reason or wait_reason
            earliest = max(earliest, seq.arrival_time - OVERTAKING_WINDOW_SECONDS)
            latest = min(latest, seq.arrival_time + OVERTAKING_WINDOW_SECONDS)
            last_position = min(last_position, position + MAX_OVERTAKERS)
            if seq.retry_group:
                break  # nothing overtakes a sequence that is retried
    return selected, reason


def _adapter_rank(seq: Sequence) -> tuple[int, int]:
    """Version and rank of its LoRA adapter; 0 without one."""
    return (seq.request.adapter.version, seq.request.adapter.rank) if seq.request.adapter else (0, 0)


class PaddedAdmission:
    """Sequences join by a prefill of whole prompts, while the running ones wait."""

    def __init__(
        self, limits: BatchLimits, capacity: CapacityLimits, running: list[Sequence], counters: BatcherCounters
    ) -> None:
        self._limits = limits
        self._capacity = capacity
        self._counters = counters
        seqs = [(len(seq.tokens), seq.num_remaining_tokens) for seq in running]
        self._peak_estimator = PeakEstimator(seqs, limits.padded, capacity.context_tokens)
        self._joining_lengths: list[int] = []
        self._alone = not running

    def wait_reason(self, seq: Sequence) -> WaitReason | None:
        """Why a sequence cannot join those already admitted, None if it can: the batch must stay within memory until
        its end, the prefill within its limits.
        """
        if self._alone:
            return None  # checked at start
        if not self._peak_estimator.fits(*_after_prefill(seq)):
            return WaitReason.MEMORY
        lengths = [*self._joining_lengths, len(seq.tokens)]
        num_tokens = padded_tokens(lengths, self._limits.padded)
        if len(lengths) > 1 and num_tokens > self._capacity.prefill_tokens:
            self._counters.prefill_weight_exceeded += 1
            return WaitReason.PREFILL_SIZE
        if (num_tokens - sum(lengths)) / num_tokens > self._limits.max_prefill_padding:
            self._counters.prefill_padding_exceeded += 1
            return WaitReason.PREFILL_PADDING
        return None

    def admit(self, seq: Sequence) -> None:
        after = _after_prefill(seq)
        self._counters.granular_additions += not (self._alone or self._peak_estimator.fits_worst_case(*after))
        self._alone = False
        self._peak_estimator.add(*after)
        self._joining_lengths.append(len(seq.tokens))


def _after_prefill(seq: Sequence) -> tuple[int, int]:
    """Length and tokens still to be generated once it has its first new token."""
    return len(seq.tokens) + 1, seq.num_remaining_tokens - 1


class PagedAdmission:
    """Sequences join on the KV blocks that they need now; when they grow, the youngest give up theirs."""

    def __init__(
        self, manager: BlockManager, max_blocks: int, running: list[Sequence], budget: int, counters: BatcherCounters
    ) -> None:
        """At most `max_blocks` are to be in use; each running sequence may soon need one more."""
        prefilling = [seq for seq in running if not seq.decoding]
        promised = sum(manager.missing_blocks(seq, len(seq.tokens) + 1) for seq in prefilling)
        pool = manager.pool
        self._block_manager = manager
        self._free_blocks = min(pool.num_available, max_blocks - pool.num_used) - promised - len(running)
        self._worst_case_free_blocks = max_blocks - sum(manager.blocks_for(seq, seq.max_length) for seq in running)
        self._max_chunk = max(budget // MAX_CHUNKS, 1)
        counted = prefilling if manager.encoder_decoder else prefilling[1:]  # the first chunk has its own share
        self._budget = budget - sum(map(self._chunk, counted))
        self._prefilling = prefilling
        self._alone = not running
        self._overtaking = False  # whether a sequence has to wait already
        self._num_hashed_before = manager.num_hashed_blocks
        self._counters = counters

    def wait_reason(self, seq: Sequence) -> WaitReason | None:
        """Why a sequence cannot join those already admitted, None if it can: there must be blocks for its prompt, and
        tokens left in the step to start it.
        """
        if self._alone:
            return None  # checked at start
        reason = self._reason(seq)
        self._overtaking |= reason is not None
        return reason

    def admit(self, seq: Sequence) -> None:
        max_blocks = self._block_manager.blocks_for(seq, seq.max_length)
        self._counters.granular_additions += not self._alone and max_blocks > self._worst_case_free_blocks
        self._alone = False
        self._worst_case_free_blocks -= max_blocks
        self._free_blocks -= self._block_manager.new_blocks_needed(seq) + 1
        self._block_manager.attach_cached_prefix(seq, self._counters)
        self._budget -= self._chunk(seq) if self._prefilling or self._block_manager.encoder_decoder else 0
        self._prefilling.append(seq)

    def _chunk(self, seq: Sequence) -> int:
        """Tokens that are kept for it, so that it is worth starting; all of them where prompts are whole."""
        most = seq.num_uncomputed_tokens if self._block_manager.encoder_decoder else self._max_chunk
        return min(seq.num_uncomputed_tokens, most)

    def _reason(self, seq: Sequence) -> WaitReason | None:
        manager = self._block_manager
        if self._free_blocks <= 0:
            return WaitReason.MEMORY
        if self._budget <= 0:
            self._counters.prefill_weight_exceeded += 1
            return WaitReason.PREFILL_SIZE
        if self._overtaking and manager.num_hashed_blocks - self._num_hashed_before > _MAX_HASHES_TO_OVERTAKE:
            return WaitReason.MEMORY  # it would take too long to find out
        if any(manager.shares_inflight_prefix(seq, other) for other in self._prefilling):
            return WaitReason.PREFIX_CACHE
        if manager.needs_at_least(seq, self._free_blocks) or manager.new_blocks_needed(seq) >= self._free_blocks:
            return WaitReason.MEMORY
        return None
