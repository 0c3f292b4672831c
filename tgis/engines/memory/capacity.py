"""How many tokens of context, or blocks of KV cache, fit into memory beside the model and the largest step."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tgis.engines.memory.available import DEFAULT_MARGIN, memory_for_batches, rank_memory, safety_margin
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.utils.logs import format_bytes

log = logging.getLogger(__name__)

_EXACT_MARGIN = 8  # percent of memory for what torch's count of a GPU's memory leaves out
_ROUNDED_BLOCKS = 64  # block counts are multiples: cached graphs are for one, and free memory varies
_CPU_KV_FRACTION = 0.4  # share of the free memory, unless an option gives the size of the KV cache
_LIMITS = "MAX_SEQUENCE_LENGTH, MAX_BATCH_SIZE or KV_CACHE_SIZE_MB"
Measure = Callable[[], int]  # bytes that steps need beside the KV cache


@dataclass(frozen=True, slots=True)
class KVCacheCost:
    """The most bytes that a padded KV cache needs: for each token of the batch, padding included, and a fixed part."""

    bytes_per_token: float
    fixed_bytes: int

    def __add__(self, other: "KVCacheCost") -> "KVCacheCost":
        return KVCacheCost(self.bytes_per_token + other.bytes_per_token, self.fixed_bytes + other.fixed_bytes)


def padded_capacity(
    options: EngineOptions, max_batch_size: int, cost: KVCacheCost, available: int, measure: Measure
) -> int:
    """Tokens of context, padding included, that fit into the `available` bytes, for a padded engine that holds no
    sequences. `measure` tells the bytes that steps need.

    StartError if nothing would fit.
    """
    if options.estimate_memory == "manual":
        return manual_capacity(options.max_sequence_length, max_batch_size, safety_margin(options))
    reserved = cost.fixed_bytes
    if options.estimate_memory == "auto":
        reserved += measure()
    tokens = int((available - reserved) / cost.bytes_per_token)
    text = (
        f"{format_bytes(available)} are there for batches, BATCH_SAFETY_MARGIN taken off; steps of {max_batch_size} "
        f"rows take {format_bytes(reserved)}, and each token of context {format_bytes(cost.bytes_per_token)}: room for "
        f"{max(tokens, 0)} tokens"
    )
    if tokens < 1:
        raise StartError(f"{text}; lower MAX_BATCH_SIZE, choose a smaller DTYPE or grant more memory")
    log.info("%s", text)
    return tokens


def manual_capacity(max_length: int, max_batch_size: int, margin: int) -> int:
    """Tokens, or blocks, of context that fit according to `manual`.

    Like in TGIS, but the margin counts once, and one request of the full length always fits.
    """
    return max(max_length, max_length * max_batch_size * (100 - margin) // 100)


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What the KV cache of a rank may take."""

    options: EngineOptions
    device: torch.device
    max_batch_size: int
    block_size: int
    to_load: int = 0  # bytes of weights that are not loaded yet
    extra_blocks: int = 0  # an encoder-decoder's, beyond those of its tokens in one row

    def with_states(self, slot_bytes: int, proposed: int, measure: Measure) -> tuple[int, "KVBudget"]:
        """The number of slots for the states of recurrent layers, and what they leave for the KV cache: for each
        sequence a slot, with a prefix cache also a snapshot, and some for `proposed` tokens, in at most half of what
        there is for sequences. StartError for none.
        """
        most = self._available_bytes(measure) // 2 // slot_bytes
        if most < 1:
            raise StartError(f"no memory is left for states of {format_bytes(slot_bytes)}: grant more memory")
        slots = min(self.max_batch_size * (1 + self.options.prefix_cache) + proposed, most)
        rows = min(self.max_batch_size, slots)
        return slots, replace(self, max_batch_size=rows, to_load=self.to_load + slots * slot_bytes)

    def num_blocks(self, block_bytes: int, measure: Measure) -> int:
        """The number of blocks that fit into memory, but no more than the largest batch can fill. StartError for none,
        or if the options want more.
        """
        longest = -(-self.options.max_sequence_length // self.block_size) + self.extra_blocks
        blocks = self.max_batch_size * longest
        if not block_bytes:  # no layer has attention
            return blocks
        if self.options.kv_cache_bytes is not None:
            blocks = min(blocks, self.options.kv_cache_bytes // self.options.num_shards // block_bytes)
        elif self.options.estimate_memory == "manual":
            blocks = manual_capacity(longest, self.max_batch_size, safety_margin(self.options))
        else:
            available = self._available_bytes(measure) // block_bytes
            if self.device.type == "cuda" and available >= 16 * _ROUNDED_BLOCKS:  # costs few of them
                available -= available % _ROUNDED_BLOCKS
            blocks = min(blocks, available)
        free = max(rank_memory(self.options, self.device) - self.to_load, 0)
        if not 0 < blocks * block_bytes <= free:
            sizes = f"of {format_bytes(max(blocks, 1) * block_bytes)}, {format_bytes(free)} are free"
            raise StartError(f"no memory is left for a KV cache {sizes}: lower {_LIMITS} or grant more memory")
        return blocks

    def _available_bytes(self, measure: Measure) -> int:
        peak = measure() if self.options.estimate_memory != "off" else 0  # first: libraries take memory in a step
        on_cpu = self.device.type == "cpu"
        is_measured = not on_cpu and not self.extra_blocks and self.options.estimate_memory == "auto"
        is_final = self.options.adapter_store is None  # adapters take memory later
        margin = _EXACT_MARGIN if is_measured and is_final else DEFAULT_MARGIN
        free = memory_for_batches(self.options, self.device, margin, self.to_load)
        return min(int(free * _CPU_KV_FRACTION) if on_cpu else free, free - peak)
