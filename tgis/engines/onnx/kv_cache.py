"""The KV cache of ONNX graphs, whose passes read one tensor and write another that is longer.

Tensors are rectangular: shorter sequences have padding on the side that the mask hides.
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
            self.swap([tensor[:, :, kept].clone(memory_format=torch.contiguous_format) for tensor in self.tensors])

    def merged(self, other: "PastKeyValues") -> "PastKeyValues":
        """A cache with the sequences of both, those of `other` last."""
        self.trim()
        columns = max(self.columns, other.columns)
        pairs = zip(self._padded_to(columns), other._padded_to(columns), strict=True)
        return PastKeyValues(self.seq_lens + other.seq_lens, [torch.cat(pair) for pair in pairs], self.left_padded)

    def _padded_to(self, columns: int) -> list[Tensor]:
        extra = columns - self.columns
        padding = (0, 0, extra, 0) if self.left_padded else (0, 0, 0, extra)
        return [pad(tensor, padding) if extra else tensor for tensor in self.tensors]


def _allocate(old: Tensor, like: Tensor, columns: int) -> Tensor:
    """A tensor [rows, heads, columns, head size] like `like`, in the memory of `old` if that is large enough."""
    rows, heads, _, size = like.shape
    needed = rows * heads * columns * size
    if old.untyped_storage().nbytes() < needed * like.element_size():
        old = like.new_empty(rows * heads * (columns + _COLUMN_STEP) * size)
    return old.as_strided((needed,), (1,), 0).view(rows, heads, columns, size)
