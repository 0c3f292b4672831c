"""What the kernels of attention take."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends."""

    scale: float
    window: int | None = None  # tokens that a token sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: logits that take part in the softmax and add nothing


@dataclass(slots=True)
class PrefillChunk:
    """A sequence that computes more than one token in a step."""

    tokens: slice  # of the flat batch
    num_computed_tokens: int  # already in the cache
    block_table: Tensor  # int64 [blocks], of all tokens up to the last of this step
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window

    @property
    def num_tokens(self) -> int:
        """New ones."""
        count: int = self.tokens.stop - self.tokens.start
        return count

    @property
    def seq_len(self) -> int:
        """Up to the last token of this step."""
        return self.num_computed_tokens + self.num_tokens
