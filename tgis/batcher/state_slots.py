"""Slots for the states of recurrent layers: one for each running sequence, the others for snapshots and proposals.

A snapshot holds the states after the last token of a full block, and has the hash of that block. A sequence with a
cached prefix continues from the snapshot at its end, and saves snapshots where later sequences may continue. Slots are
to states what blocks are to the KV cache, so a BlockPool manages them: running sequences and the next step use theirs,
unused snapshots are evicted when a slot is needed, least recently used first.

A step with proposed tokens saves the states before each of them: its sequence continues from the last that was kept.
"""

from collections.abc import Callable, Iterable

from tgis.batcher.block_pool import BlockPool
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence


class StateSlots:
    """Each step leaves the states of a sequence in its `state_slot`. It reads them in `state_source` if that is set."""

    def __init__(self, limits: BatchLimits, block_hash: Callable[[Sequence, int], bytes]) -> None:
        """`block_hash` names the block of a sequence with this index."""
        self.pool = BlockPool(limits.state_slots)
        self._block_size = limits.block_size
        self._takes_snapshots = limits.prefix_cache
        self._num_reserved = limits.max_batch_size * (1 + limits.prefix_cache)  # slots that proposals leave
        self._block_hash = block_hash
        self._max_sequences = limits.max_batch_size
        self._num_sequences = 0

    def allocate(self, seq: Sequence, num_found_blocks: int) -> None:
        """Give a sequence a slot, and keep the snapshot of its cached prefix until its first step.

        A snapshot that is kept takes one more slot. If this left too few for sequences that may still join, the
        sequence gets the slot of the snapshot. `num_found_blocks` were cached, whether there is a snapshot or not:
        another sequence began with the same tokens, so more will, and a snapshot is taken at their end.
        """
        seq.state_boundaries = {num_found_blocks, (len(seq.tokens) - 1) // self._block_size}
        self._num_sequences += 1
        if not seq.num_cached_blocks:
            (seq.state_slot,) = self.pool.allocate(1)
            return
        block_hash = self._block_hash(seq, seq.num_cached_blocks - 1)
        (snapshot,) = self.pool.find_cached([block_hash])
        self.pool.incref([snapshot])
        if self.pool.num_available > self._max_sequences - self._num_sequences:
            seq.state_source = snapshot
            (seq.state_slot,) = self.pool.allocate(1)
        else:
            self.pool.forget(block_hash)
            seq.state_slot = snapshot

    def plan_snapshots(self, scheduled: Iterable[tuple[Sequence, int]]) -> None:
        """Choose the snapshots that a step takes of sequences and the tokens that each computes, if slots are left.

        There is one at each of the `state_boundaries`, and behind them one at the last full block, which replaces the
        one before it: the next turn of a conversation continues there.
        """
        for seq, count in scheduled if self._takes_snapshots else ():
            begin = seq.num_computed_tokens // self._block_size
            end = (seq.num_computed_tokens + count) // self._block_size
            if begin < end:
                last = max(end, *seq.state_boundaries)
                for boundary in sorted(seq.state_boundaries | {last}):
                    if begin < boundary <= end:
                        self._plan_snapshot(seq, boundary)

    def plan_proposals(self, seq: Sequence, count: int) -> int:
        """Let the step of a sequence that decodes save the states before each of `count` proposed tokens, and those
        that may become a snapshot. Returns for how many of the tokens there are slots.
        """
        first = seq.num_computed_tokens
        ends_block = self._takes_snapshots and not (first + count + 1) % self._block_size
        for position in range(first, first + count + ends_block):
            if self.pool.num_available + self._num_sequences <= self._num_reserved:
                return min(position - first, count)
            if position not in seq.state_saves:
                (seq.state_saves[position],) = self.pool.allocate(1)
        return count

    def step_succeeded(self, seq: Sequence, *, rejected: bool) -> None:
        """Let others find the snapshots that a step has taken of a sequence. If some of its proposals were `rejected`,
        it continues from the states after its last computed token.
        """
        for position, slot in seq.state_saves.items() if self._takes_snapshots else ():
            boundary, rest = divmod(position + 1, self._block_size)
            if not rest and position < seq.num_computed_tokens:
                self._forget_older(seq, boundary)
                self.pool.set_hash(slot, self._block_hash(seq, boundary - 1))
        source = seq.state_saves.pop(seq.num_computed_tokens - 1) if rejected else -1
        self._free_snapshots(seq)
        seq.state_source = source

    def free(self, seq: Sequence) -> None:
        """Take away all slots of a running sequence; snapshots of a step that has not succeeded are lost."""
        self._free_snapshots(seq)
        self.pool.free([seq.state_slot])
        seq.state_slot = -1
        self._num_sequences -= 1

    def _plan_snapshot(self, seq: Sequence, boundary: int) -> None:
        block_hash = self._block_hash(seq, boundary - 1)
        if not self.pool.num_available or self.pool.find_cached([block_hash]):
            return
        self._forget_older(seq, boundary)  # now: its slot may be the only one that is left
        (seq.state_saves[boundary * self._block_size - 1],) = self.pool.allocate(1)

    def _forget_older(self, seq: Sequence, boundary: int) -> None:
        """Let the snapshot at this boundary replace the newest one, unless it is one of the `state_boundaries`."""
        block_hash = self._block_hash(seq, boundary - 1)
        if boundary > max(seq.state_boundaries) and not self.pool.find_cached([block_hash]):
            self.pool.forget(seq.rolling_snapshot)
            seq.rolling_snapshot = block_hash

    def _free_snapshots(self, seq: Sequence) -> None:
        """Stop using the snapshots that the next step reads and writes."""
        self.pool.free([*seq.state_saves.values(), *([seq.state_source] if seq.state_source >= 0 else [])])
        seq.state_saves, seq.state_source = {}, -1
