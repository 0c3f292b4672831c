"""The paged KV cache: keys and values of every layer in blocks. Who owns a block is decided by the batcher."""

from torch import Tensor

from tgis.engines.host_memory import empty_in_huge_pages


class PagedKVCache:
    """Keys and values by layer: [blocks, block size, heads, head size], allocated when a layer is first seen. The order
    of the numbers in a block is that of the kernel that writes it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers seen."""
        return sum(int(t[0].nbytes) for layer in self._layers.values() for t in layer)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers seen."""
        return self.bytes_per_block * self.num_blocks

    def __getitem__(self, layer_index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has been seen."""
        return self._layers[layer_index]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of any layer, allocated for states like `key` and `value` [1, heads, tokens, head size]."""
        if index not in self._layers:
            self._layers[index] = self._allocate(key), self._allocate(value)
        return self._layers[index]

    def _allocate(self, like: Tensor) -> Tensor:
        size = self.num_blocks, self.block_size, like.shape[1], like.shape[3]
        on_cpu = like.device.type == "cpu"
        states = empty_in_huge_pages(size, like.dtype) if on_cpu else like.new_empty(size)
        return states.zero_()  # slots that were never written may be read and masked, and must be finite
