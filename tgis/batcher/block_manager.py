"""The KV blocks of each sequence: cached prefixes, blocks for the tokens of a step, blocks to release.

Sequences are admitted on what their prompts need, not on what they may grow to. When blocks run out, the batcher
preempts those whose turns are last; the first always proceeds. BlockPool owns the blocks' states.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable

from tgis.batcher.block_pool import BlockPool
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence
from tgis.batcher.state_slots import StateSlots
from tgis.ipc.messages import BatcherCounters

_HASH_BYTES = 16


class BlockManager:
    """Block n of a block table holds tokens n * block_size up to (n + 1) * block_size.

    That of an encoder-decoder has two such parts: first the input, then what the decoder computes, which are its
    virtual tokens, the start token and the output. The input is computed at once. Each of its blocks depends on all of
    it, so no prefix is cached.
    """

    def __init__(self, limits: BatchLimits) -> None:
        """Manage the blocks that fit into memory according to `limits`."""
        self.pool = BlockPool(limits.token_capacity // limits.block_size)
        self.block_size = limits.block_size
        self.encoder_decoder = limits.encoder_decoder
        self.num_hashed_blocks = 0  # ever: hashing takes time
        self._prefix_cache = limits.prefix_cache and not limits.encoder_decoder
        self._lookahead = limits.lookahead
        self.states = StateSlots(limits, self._block_hash) if limits.state_slots else None

    def blocks_for(self, seq: Sequence, tokens: int) -> int:
        """Number of blocks that hold this many tokens of a sequence; of an encoder-decoder at least the prompt."""
        if not self.encoder_decoder:
            return -(-tokens // self.block_size)
        decoder_tokens = seq.request.decoder_length + 1 + tokens - seq.prompt_length
        return -(-seq.request.input_positions // self.block_size) - (-decoder_tokens // self.block_size)

    def missing_blocks(self, seq: Sequence, tokens: int) -> int:
        """Number of blocks that a sequence lacks to hold this many tokens."""
        return max(0, self.blocks_for(seq, tokens) - len(seq.block_table))

    def cached_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks that a waiting sequence begins with; at least one token is left to compute.

        With recurrent layers, those up to the last snapshot: the sequence computes the others again.
        """
        cached = self._find_cached(seq)
        return cached[: self.states.pool.last_cached(seq.block_hashes[: len(cached)])] if self.states else cached

    def shares_inflight_prefix(self, seq: Sequence, other: Sequence) -> bool:
        """Whether the next block that `other` will fill is the first that a waiting sequence does not find cached.

        With recurrent layers a prefix is found up to a snapshot only, so `other` is made to take one at the end of
        their common blocks.
        """
        index, most = other.num_cached_blocks, min(self._max_cached_blocks(seq), len(other.tokens) // self.block_size)
        if index >= most or self._block_hash(seq, 0) != self._block_hash(other, 0):
            return False
        shared = self._block_hash(seq, index) == self._block_hash(other, index)
        if shared and self.states:
            hashes, other_hashes = self._block_hashes(seq, most), self._block_hashes(other, most)
            num_common = bisect_left(range(most), True, key=lambda index: hashes[index] != other_hashes[index])
            other.state_boundaries.add(num_common)
        return shared

    def needs_at_least(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether two look-ups show that a waiting sequence needs at least `num_blocks` free blocks."""
        last = self.blocks_for(seq, len(seq.tokens) + 1) - num_blocks  # the last block that would have to be in use
        if last < 0:
            return False
        if last >= self._max_cached_blocks(seq):
            return True
        return not (self.pool.is_used(self._block_hash(seq, 0)) and self.pool.is_used(self._block_hash(seq, last)))

    def new_blocks_needed(self, seq: Sequence) -> int:
        """Free blocks needed for a waiting sequence plus one token; blocks that others use are not counted."""
        return self.blocks_for(seq, len(seq.tokens) + 1) - self.pool.count_used(self.cached_prefix(seq))

    def attach_cached_prefix(self, seq: Sequence, counters: BatcherCounters) -> None:
        """Give a sequence the cached blocks of its prefix."""
        seq.block_table = self.cached_prefix(seq)
        self.pool.incref(seq.block_table)
        seq.num_cached_blocks = len(seq.block_table)
        seq.num_computed_tokens = seq.num_cached_blocks * self.block_size
        if self._uses_prefix_cache(seq):
            counters.prefix_cache_queries += len(seq.tokens)
            counters.prefix_cache_hits += seq.num_computed_tokens
        if self.states:
            self.states.allocate(seq, len(self._find_cached(seq)))

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a sequence the blocks for `num_tokens` more tokens, all or none."""
        missing = self.missing_blocks(seq, seq.num_computed_tokens + num_tokens)
        if missing > self.pool.num_available:
            return False
        if missing:
            seq.block_table += self.pool.allocate(missing)
        return True

    def allocate_lookahead(self, scheduled: Iterable[tuple[Sequence, int]]) -> None:
        """Give sequences that get a token in this step blocks for those after it, as far as there are any.

        An engine that launches the next step early needs them. All have what they need for this step already.
        """
        for seq, count in scheduled if self._lookahead else ():
            if count == seq.num_uncomputed_tokens:
                self.allocate(seq, count + min(self._lookahead, seq.num_remaining_tokens - 1))

    def allocate_proposals(self, seq: Sequence, count: int) -> int:
        """Give a sequence what `count` proposed tokens after its newest one need, or fewer. Returns for how many there
        is room.
        """
        if self.states:
            count = self.states.plan_proposals(seq, count)
        while count and not self.allocate(seq, 1 + count):
            count -= 1
        return count

    def free_unused(self, seq: Sequence) -> None:
        """Take away the blocks that a sequence does not need for its tokens: those of proposals that were not kept."""
        needed = self.blocks_for(seq, len(seq.tokens))
        if needed < len(seq.block_table):
            self.pool.free(seq.block_table[needed:])
            seq.block_table = seq.block_table[:needed]  # a new list: engines expect others only to grow

    def step_succeeded(self, seq: Sequence, *, rejected: bool) -> None:
        """Let others find the blocks that the sequence has filled, and the snapshots that its step has taken. Some of
        its proposals may have been `rejected`.
        """
        if self._prefix_cache:
            for index in range(seq.num_cached_blocks, seq.num_computed_tokens // self.block_size):
                self.pool.set_hash(seq.block_table[index], self._block_hash(seq, index))
                seq.num_cached_blocks += 1
        if self.states:
            self.states.step_succeeded(seq, rejected=rejected)

    def free(self, seqs: Iterable[Sequence]) -> None:
        """Take away all blocks, so that these sequences have no computed tokens any more."""
        for seq in seqs:
            self.pool.free(seq.block_table)
            if self.states:
                self.states.free(seq)
            seq.block_table = []
            seq.num_computed_tokens = seq.num_cached_blocks = 0

    def flush(self) -> None:
        """Let no sequence find a cached prefix that is there now."""
        for pool in (self.pool, *([self.states.pool] if self.states else [])):
            pool.forget_all()

    def _uses_prefix_cache(self, seq: Sequence) -> bool:
        """Whether a sequence may start with cached blocks: prompt logprobs need the whole prompt computed."""
        return self._prefix_cache and not seq.wants_prompt_logprobs

    def _find_cached(self, seq: Sequence) -> list[int]:
        """The cached blocks that a waiting sequence begins with, whether there are states to go on from or not."""
        cached: list[int] = []
        most, looked = self._max_cached_blocks(seq), len(seq.block_hashes)
        while len(cached) < most:
            looked = min(max(looked, 2 * len(cached) + 1), most)  # hash no more blocks than are likely to be found
            cached = self.pool.find_cached(self._block_hashes(seq, looked)[:looked])
            if len(cached) < looked:
                break
        return cached

    def _max_cached_blocks(self, seq: Sequence) -> int:
        """Number of blocks that need not be computed if they are cached."""
        return (len(seq.tokens) - 1) // self.block_size if self._uses_prefix_cache(seq) else 0

    def _block_hash(self, seq: Sequence, index: int) -> bytes:
        return self._block_hashes(seq, index + 1)[index]

    def _block_hashes(self, seq: Sequence, count: int) -> list[bytes]:
        """At least `count` hashes, each over the one before it and the block: equal hashes mean equal prefixes."""
        hashes = seq.block_hashes
        if len(hashes) < count:
            tokens = array("i", seq.tokens[len(hashes) * self.block_size : count * self.block_size])
            width, data = self.block_size * tokens.itemsize, tokens.tobytes()
            self.num_hashed_blocks += count - len(hashes)
            for begin in range(0, len(data), width):
                parent = hashes[-1] if hashes else _hash(seq.request.cache_salt)
                hashes.append(_hash(parent + data[begin : begin + width]))
        return hashes


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
