"""The KV cache of ONNX graphs, whose passes read one tensor and write another that is longer.

Tensors are rectangular: shorter sequences have padding on the side that the mask hides. Sequences that share a pass are
a sub-batch; the model says whether sequences of different lengths can.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgis.engines.padded.model import padding_mask

_COLUMN_STEP = 64  # columns allocated in advance


@dataclass(slots=True)
class PastKeyValues:
    """Tensors [rows, heads, columns, head size], and the length of each row's sequence."""

    seq_lens: list[int]
    tensors: list[Tensor]  # contiguous
    left_padded: bool
    spare: list[Tensor] = field(default_factory=list)  # the tensors before the last pass, which the next one overwrites

    @property
    def columns(self) -> int:
        """Computed columns, padding included."""
        return int(self.tensors[0].shape[2])

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.tensors, *self.spare))

    def attention_mask(self, columns: int) -> Tensor:
        """Which of the leftmost `columns` are tokens of their row: bool [rows, columns]."""
        return padding_mask(self.seq_lens, columns, left_padded=self.left_padded)

    def allocate(self, columns: int) -> list[Tensor]:
        """Contiguous uninitialized tensors with `columns`, in the spare memory if it is large enough."""
        self.spare = self.spare or [tensor.new_empty(0) for tensor in self.tensors]
        return [_allocate(old, tensor, columns) for old, tensor in zip(self.spare, self.tensors, strict=True)]

    def swap(self, tensors: list[Tensor]) -> None:
        """Take the tensors that a pass has written; the old ones become spare."""
        self.tensors, self.spare = tensors, self.tensors

    def remove(self, index: int) -> None:
        """Remove a sequence; the last one takes its index."""
        self.seq_lens[index] = self.seq_lens[-1]
        self.seq_lens.pop()
        for tensor in self.tensors:
            tensor[index] = tensor[-1]
        self.tensors = [tensor[:-1] for tensor in self.tensors]

    def trim(self) -> None:
        """Drop columns that only removed sequences had."""
        extra = self.columns - max(self.seq_lens)
        if extra:
            kept = slice(extra, None) if self.left_padded else slice(0, -extra)
            self.swap([_contiguous(tensor[:, :, kept]) for tensor in self.tensors])

    def merge(self, others: list["PastKeyValues"]) -> None:
        """Append the sequences of other caches."""
        caches = [self, *others]
        for cache in caches:
            cache.trim()
        columns = max(cache.columns for cache in caches)
        parts = [cache._padded_to(columns) for cache in caches]
        self.seq_lens = [length for cache in caches for length in cache.seq_lens]
        self.tensors = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        self.spare = []

    def _padded_to(self, columns: int) -> list[Tensor]:
        extra = columns - self.columns
        padding = (0, 0, extra, 0) if self.left_padded else (0, 0, 0, extra)
        return [pad(tensor, padding) if extra else tensor for tensor in self.tensors]


@dataclass(slots=True)
class SubBatch:
    """Sequences that share their passes."""

    rows: list[int]  # in the batch
    self_attention: PastKeyValues
    cross_attention: PastKeyValues | None = None

    @property
    def caches(self) -> list[PastKeyValues]:
        return [self.self_attention] if self.cross_attention is None else [self.self_attention, self.cross_attention]

    def extend(self) -> PastKeyValues:
        """The cache for a pass over one more token of each sequence."""
        for cache in self.caches:
            cache.trim()
        self.self_attention.seq_lens = [length + 1 for length in self.self_attention.seq_lens]
        return self.self_attention

    def remove(self, row: int) -> None:
        index = self.rows.index(row)
        for cache in self.caches:
            cache.remove(index)
        self.rows[index] = self.rows[-1]
        self.rows.pop()

    def merge(self, others: list["SubBatch"]) -> None:
        for index, cache in enumerate(self.caches):
            cache.merge([other.caches[index] for other in others])
        self.rows += [row for other in others for row in other.rows]


class SubBatches:
    """The rows of a batch, 0 to n-1 without gaps; rows that have not been computed yet are in no sub-batch."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.sub_batches: list[SubBatch] = []

    @property
    def allocated_bytes(self) -> int:
        return sum(cache.allocated_bytes for sub_batch in self.sub_batches for cache in sub_batch.caches)

    def remove(self, row: int) -> None:
        """Free a row; the last one moves there."""
        self.num_rows -= 1
        for sub_batch in self.sub_batches:
            if row in sub_batch.rows:
                sub_batch.remove(row)
            sub_batch.rows = [row if number == self.num_rows else number for number in sub_batch.rows]
        self.sub_batches = [sub_batch for sub_batch in self.sub_batches if sub_batch.rows]

    def regroup(self, any_length: bool) -> list[SubBatch]:
        """Merge sub-batches: into one if it may have any length, else into one for each length."""
        found = self.sub_batches
        groups = group_by_length([sub_batch.self_attention.seq_lens[0] for sub_batch in found], any_length)
        self.sub_batches = [_merge([found[index] for index in group]) for group in groups]
        return self.sub_batches


def group_by_length(seq_lens: list[int], any_length: bool) -> list[list[int]]:
    """Indices of sequences that can share a pass: all, or those of each length."""
    if any_length:
        return [list(range(len(seq_lens)))]
    return [[index for index, own in enumerate(seq_lens) if own == length] for length in sorted(set(seq_lens))]


def _merge(group: list[SubBatch]) -> SubBatch:
    first, *others = group
    if others:
        first.merge(others)
    return first


def _allocate(old: Tensor, like: Tensor, columns: int) -> Tensor:
    """A tensor [rows, heads, columns, head size] like `like`, in the memory of `old` if that is large enough."""
    rows, heads, _, size = like.shape
    needed = rows * heads * columns * size
    if old.untyped_storage().nbytes() < needed * like.element_size():
        old = like.new_empty(rows * heads * (columns + _COLUMN_STEP) * size)
    return old.as_strided((needed,), (1,), 0).view(rows, heads, columns, size)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
