"""Keys and values between the passes of ONNX graphs, which read one tensor and write another that is longer.

A block is rectangular: rows that are shorter have padding on the side that its mask hides. Rows whose passes can be
one are a cohort; which rows can, the model knows. Owns the numbers of rows, no token and no request.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

_COLUMN_STEP = 64  # that tensors have room for beyond their need


@dataclass(slots=True)
class PastKeyValues:
    """Tensors [rows, heads, columns, size] and how many of the columns belong to each row."""

    seq_lens: list[int]
    tensors: list[Tensor]  # contiguous
    left_padded: bool
    spare: list[Tensor] = field(default_factory=list)  # those before the last pass, for the next one to write to

    @property
    def columns(self) -> int:
        """That have been computed, padding included."""
        return int(self.tensors[0].shape[2])

    @property
    def allocated_bytes(self) -> int:
        """Of all tensors, spare ones included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.tensors, *self.spare))

    def attention_mask(self, columns: int) -> Tensor:
        """Which of the leftmost `columns` are tokens of their row: bool [rows, columns]."""
        lengths = torch.tensor(self.seq_lens)[:, None]
        places = torch.arange(columns)
        return places >= lengths.max() - lengths if self.left_padded else places < lengths

    def allocate(self, columns: int) -> list[Tensor]:
        """Contiguous tensors of so many columns, with anything in them."""
        self.spare = self.spare or [tensor.new_empty(0) for tensor in self.tensors]
        return [_allocate(old, tensor, columns) for old, tensor in zip(self.spare, self.tensors, strict=True)]

    def swap(self, tensors: list[Tensor]) -> None:
        """What a pass has written stands now."""
        self.tensors, self.spare = tensors, self.tensors

    def remove(self, place: int) -> None:
        """Forget a row; the last one takes its place."""
        self.seq_lens[place] = self.seq_lens[-1]
        self.seq_lens.pop()
        for tensor in self.tensors:
            tensor[place] = tensor[-1]
        self.tensors = [tensor[:-1] for tensor in self.tensors]

    def trim(self) -> None:
        """Drop the columns that only rows had that have left."""
        extra = self.columns - max(self.seq_lens)
        if extra:
            kept = slice(extra, None) if self.left_padded else slice(0, -extra)
            self.swap([_contiguous(tensor[:, :, kept]) for tensor in self.tensors])

    def merge(self, others: list["PastKeyValues"]) -> None:
        """Take in the rows of others, behind the present ones."""
        blocks = [self, *others]
        for block in blocks:
            block.trim()
        columns = max(block.columns for block in blocks)
        parts = [block._padded_to(columns) for block in blocks]
        self.seq_lens = [length for block in blocks for length in block.seq_lens]
        self.tensors = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        self.spare = []

    def _padded_to(self, columns: int) -> list[Tensor]:
        extra = columns - self.columns
        padding = (0, 0, extra, 0) if self.left_padded else (0, 0, 0, extra)
        return [pad(tensor, padding) if extra else tensor for tensor in self.tensors]


@dataclass(slots=True)
class SubBatch:
    """Rows that take their passes together."""

    rows: list[int]  # their numbers in the batch
    self_attention: PastKeyValues
    cross_attention: PastKeyValues | None = None  # what a decoder keeps of the encoder's output

    @property
    def caches(self) -> list[PastKeyValues]:
        """Decoded, and encoded if there is such a thing."""
        return [self.self_attention] if self.cross_attention is None else [self.self_attention, self.cross_attention]

    def extend(self) -> PastKeyValues:
        """Before a pass over one more token of each row: what it extends."""
        for block in self.caches:
            block.trim()
        self.self_attention.seq_lens = [length + 1 for length in self.self_attention.seq_lens]
        return self.self_attention

    def remove(self, row: int) -> None:
        """Forget a row by its number."""
        place = self.rows.index(row)
        for block in self.caches:
            block.remove(place)
        self.rows[place] = self.rows[-1]
        self.rows.pop()

    def merge(self, others: list["SubBatch"]) -> None:
        """Take in the rows of others."""
        for index, block in enumerate(self.caches):
            block.merge([other.caches[index] for other in others])
        self.rows += [row for other in others for row in other.rows]


class SubBatches:
    """All rows of the batch, numbered 0 to n-1 without gaps; those that joined but were never computed are in none."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._sub_batches: list[SubBatch] = []

    @property
    def allocated_bytes(self) -> int:
        """Of the states of all rows."""
        return sum(block.allocated_bytes for cohort in self._sub_batches for block in cohort.caches)

    def add(self, cohort: SubBatch) -> None:
        """Take in rows that have been computed."""
        self._sub_batches.append(cohort)

    def remove(self, row: int) -> None:
        """Forget a row; the last one gets its number."""
        self.num_rows -= 1
        for cohort in self._sub_batches:
            if row in cohort.rows:
                cohort.remove(row)
            cohort.rows = [row if number == self.num_rows else number for number in cohort.rows]
        self._sub_batches = [cohort for cohort in self._sub_batches if cohort.rows]

    def regroup(self, mixed_lengths: bool) -> list[SubBatch]:
        """Cohorts as large as they can be: one if all rows can go together, else one for each length."""
        found = self._sub_batches
        groups = group_by_length([cohort.self_attention.seq_lens[0] for cohort in found], mixed_lengths)
        self._sub_batches = [_merge([found[index] for index in group]) for group in groups]
        return self._sub_batches


def group_by_length(seq_lens: list[int], mixed_lengths: bool) -> list[list[int]]:
    """The places of what can go together: all of them, or those of each length."""
    if mixed_lengths:
        return [list(range(len(seq_lens)))]
    return [[place for place, own in enumerate(seq_lens) if own == length] for length in sorted(set(seq_lens))]


def _merge(group: list[SubBatch]) -> SubBatch:
    first, *others = group
    if others:
        first.merge(others)
    return first


def _allocate(old: Tensor, like: Tensor, columns: int) -> Tensor:
    """[rows, heads, columns, size] as `like` has them, in the memory of `old` if that is enough."""
    rows, heads, _, size = like.shape
    needed = rows * heads * columns * size
    if old.untyped_storage().nbytes() < needed * like.element_size():
        old = like.new_empty(rows * heads * (columns + _COLUMN_STEP) * size)
    return old.as_strided((needed,), (1,), 0).view(rows, heads, columns, size)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
