"""The padding of rectangular batches: ids, masks and positions of rows of different lengths.

Decoders get their rows right-aligned, with the newest tokens of all in the same column; encoders left-aligned.
"""

import torch
from torch import Tensor


def right_aligned(rows: list[list[int]]) -> Tensor:
    """Token ids [rows, columns] with 0 for the padding on the left."""
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in rows])


def left_aligned(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids [rows, columns] with 0 for the padding on the right, and the mask of the tokens."""
    lengths = [len(tokens) for tokens in rows]
    width = max(lengths)
    ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in rows])
    return ids, padding_mask(lengths, width, left_padded=False)


def padding_mask(lengths: list[int], columns: int, *, left_padded: bool) -> Tensor:
    """Which of the leftmost `columns` are tokens of their row: bool [rows, columns]."""
    own = torch.tensor(lengths)[:, None]
    column = torch.arange(columns)
    return column >= own.max() - own if left_padded else column < own


def token_positions(mask: Tensor, columns: int) -> Tensor:
    """The positions in their rows of the tokens in the last `columns` of a mask, int64 [rows, columns]; 0 for
    padding.
    """
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -columns:]
