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
class Block:
    """Tensors [rows, heads, columns, size] and how many of the columns belong to each row."""

    lengths: list[int]
    tensors: list[Tensor]  # contiguous
    padded_left: bool
    spare: list[Tensor] = field(default_factory=list)  # those before the last pass, for the next one to write to

    @property
    def columns(self) -> int:
        """That have been computed, padding included."""
        return int(self.tensors[0].shape[2])

    @property
    def held_bytes(self) -> int:
        """Of all tensors, spare ones included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (*self.tensors, *self.spare))

    def mask(self, columns: int) -> Tensor:
        """Which of the leftmost `columns` are tokens of their row: bool [rows, columns]."""
        lengths = torch.tensor(self.lengths)[:, None]
        places = torch.arange(columns)
        return places >= lengths.max() - lengths if self.padded_left else places < lengths

    def room(self, columns: int) -> list[Tensor]:
        """Contiguous tensors of so many columns, with anything in them."""
        self.spare = self.spare or [tensor.new_empty(0) for tensor in self.tensors]
        return [_room(old, tensor, columns) for old, tensor in zip(self.spare, self.tensors, strict=True)]

    def advance(self, tensors: list[Tensor]) -> None:
        """What a pass has written stands now."""
        self.tensors, self.spare = tensors, self.tensors

    def leave(self, place: int) -> None:
        """Forget a row; the last one takes its place."""
        self.lengths[place] = self.lengths[-1]
        self.lengths.pop()
        for tensor in self.tensors:
            tensor[place] = tensor[-1]
        self.tensors = [tensor[:-1] for tensor in self.tensors]

    def fit(self) -> None:
        """Drop the columns that only rows had that have left."""
        extra = self.columns - max(self.lengths)
        if extra:
            kept = slice(extra, None) if self.padded_left else slice(0, -extra)
            self.advance([_copy(tensor[:, :, kept]) for tensor in self.tensors])

    def join(self, others: list["Block"]) -> None:
        """Take in the rows of others, behind the present ones."""
        blocks = [self, *others]
        for block in blocks:
            block.fit()
        columns = max(block.columns for block in blocks)
        parts = [block._widened(columns) for block in blocks]
        self.lengths = [length for block in blocks for length in block.lengths]
        self.tensors = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
        self.spare = []

    def _widened(self, columns: int) -> list[Tensor]:
        extra = columns - self.columns
        padding = (0, 0, extra, 0) if self.padded_left else (0, 0, 0, extra)
        return [pad(tensor, padding) if extra else tensor for tensor in self.tensors]


@dataclass(slots=True)
class Cohort:
    """Rows that take their passes together."""

    rows: list[int]  # their numbers in the batch
    decoded: Block
    encoded: Block | None = None  # what a decoder keeps of the encoder's output

    @property
    def blocks(self) -> list[Block]:
        """Decoded, and encoded if there is such a thing."""
        return [self.decoded] if self.encoded is None else [self.decoded, self.encoded]

    def one_more(self) -> Block:
        """Before a pass over one more token of each row: what it extends."""
        for block in self.blocks:
            block.fit()
        self.decoded.lengths = [length + 1 for length in self.decoded.lengths]
        return self.decoded

    def leave(self, row: int) -> None:
        """Forget a row by its number."""
        place = self.rows.index(row)
        for block in self.blocks:
            block.leave(place)
        self.rows[place] = self.rows[-1]
        self.rows.pop()

    def join(self, others: list["Cohort"]) -> None:
        """Take in the rows of others."""
        for index, block in enumerate(self.blocks):
            block.join([other.blocks[index] for other in others])
        self.rows += [row for other in others for row in other.rows]


class Cohorts:
    """All rows of the batch, numbered 0 to n-1 without gaps; those that joined but were never computed are in none."""

    def __init__(self) -> None:
        self.rows = 0
        self._cohorts: list[Cohort] = []

    @property
    def held_bytes(self) -> int:
        """Of the states of all rows."""
        return sum(block.held_bytes for cohort in self._cohorts for block in cohort.blocks)

    def add(self, cohort: Cohort) -> None:
        """Take in rows that have been computed."""
        self._cohorts.append(cohort)

    def leave(self, row: int) -> None:
        """Forget a row; the last one gets its number."""
        self.rows -= 1
        for cohort in self._cohorts:
            if row in cohort.rows:
                cohort.leave(row)
            cohort.rows = [row if number == self.rows else number for number in cohort.rows]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def regrouped(self, together: bool) -> list[Cohort]:
        """Cohorts as large as they can be: one if all rows can go together, else one for each length."""
        found = self._cohorts
        groups = alike([cohort.decoded.lengths[0] for cohort in found], together)
        self._cohorts = [_merged([found[index] for index in group]) for group in groups]
        return self._cohorts


def alike(lengths: list[int], together: bool) -> list[list[int]]:
    """The places of what can go together: all of them, or those of each length."""
    if together:
        return [list(range(len(lengths)))]
    return [[place for place, own in enumerate(lengths) if own == length] for length in sorted(set(lengths))]


def _merged(group: list[Cohort]) -> Cohort:
    first, *others = group
    if others:
        first.join(others)
    return first


def _room(old: Tensor, like: Tensor, columns: int) -> Tensor:
    """[rows, heads, columns, size] as `like` has them, in the memory of `old` if that is enough."""
    rows, heads, _, size = like.shape
    needed = rows * heads * columns * size
    if old.untyped_storage().nbytes() < needed * like.element_size():
        old = like.new_empty(rows * heads * (columns + _COLUMN_STEP) * size)
    return old.as_strided((needed,), (1,), 0).view(rows, heads, columns, size)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
