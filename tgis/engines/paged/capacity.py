"""How many blocks of KV cache fit into memory, beside a model that has been loaded or, for a check, will be."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tgis.engines.memory.available import DEFAULT_MARGIN, memory_for_batches, rank_memory, safety_margin
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.utils.logs import format_bytes

BLOCK_SIZE = 16  # tokens
_EXACT_MARGIN = 8  # percent of memory for what torch's count of a GPU's memory leaves out
_ROUNDED_BLOCKS = 64  # block counts are multiples: cached graphs are for one, and free memory varies
_CPU_KV_FRACTION = 0.4  # of the free memory, unless an option says how large the KV cache is
_LIMITS = "MAX_SEQUENCE_LENGTH, MAX_BATCH_SIZE or KV_CACHE_SIZE_MB"
Measure = Callable[[], int]  # bytes that steps need beside the KV cache


@dataclass(frozen=True, slots=True)
class KVBudget:
    """What the KV cache of a rank may take."""

    options: EngineOptions
    device: torch.device
    max_batch_size: int
    block_size: int = BLOCK_SIZE
    to_load: int = 0  # bytes of weights that are not loaded yet
    extra_blocks: int = 0  # of a sequence, beyond those of its tokens in one row

    def num_blocks(self, block_bytes: int, measure: Measure) -> int:
        """The number of blocks that fit into memory, but no more than the largest batch can fill. StartError for none,
        or if the options want more.
        """
        longest = -(-self.options.max_sequence_length // self.block_size) + self.extra_blocks
        blocks = self.max_batch_size * longest
        if self.options.kv_cache_bytes is not None:
            blocks = min(blocks, self.options.kv_cache_bytes // self.options.num_shards // block_bytes)
        elif self.options.estimate_memory == "manual":
            blocks = max(longest, blocks * (100 - safety_margin(self.options)) // 100)
        else:
            available = self._available_bytes(measure) // block_bytes
            if self.device.type == "cuda" and available >= 16 * _ROUNDED_BLOCKS:  # costs few of them
                available -= available % _ROUNDED_BLOCKS
            blocks = min(blocks, available)
        free = max(rank_memory(self.options, self.device) - self.to_load, 0)
        if not 0 < blocks * block_bytes <= free:
            found = f"of {format_bytes(max(blocks, 1) * block_bytes)}, {format_bytes(free)} are free"
            raise StartError(f"no memory is left for a KV cache {found}: lower {_LIMITS} or grant more memory")
        return blocks

    def _available_bytes(self, measure: Measure) -> int:
        peak = measure() if self.options.estimate_memory != "off" else 0  # first: libraries take memory in a step
        on_cpu = self.device.type == "cpu"
        counts_exactly = not on_cpu and self.options.estimate_memory == "auto"
        is_final = self.options.adapter_store is None  # adapters take memory later
        margin = _EXACT_MARGIN if counts_exactly and is_final else DEFAULT_MARGIN
        free = memory_for_batches(self.options, self.device, margin, self.to_load)
        return min(int(free * _CPU_KV_FRACTION) if on_cpu else free, free - peak)
