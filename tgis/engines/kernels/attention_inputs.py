"""The inputs of attention kernels."""

from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass, field

from torch import Tensor

BIAS_PADDING = 32  # columns that are read, and masked, where keys and queries are computed in blocks


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The parameters of one layer's attention."""

    scale: float
    window: int | None = None  # tokens that a token sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: logits that take part in the softmax and add nothing
    bias: Tensor | None = None  # float32 [heads, columns + BIAS_PADDING], added to the scaled scores
    bias_origin: int | None = None  # the column of a token's own key; None: columns are the positions of keys
    _: KW_ONLY
    causal: bool = True  # False: a token sees later ones, too, up to the last of its sequence; there is no window then
    key_scales: Tensor | None = None  # float32 [K, D]: what keys in codes were divided by

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """The properties that kernels are specialized for."""
        bias = self.bias is None, self.bias_origin
        return self.window is None, self.softcap, self.sinks is None, *bias, self.causal

    @property
    def mask_key(self) -> Hashable:
        """What masks, with the bias in them, depend on."""
        return self.window, self.causal, None if self.bias is None else self.bias.data_ptr()


@dataclass(slots=True)
class PrefillChunk:
    """A sequence that computes more than one token in a step."""

    tokens: slice  # rows of the flat batch
    num_computed_tokens: int  # already in the cache
    block_table: Tensor  # int64 [blocks], of all tokens up to the last of this step
    masks: dict[Hashable, Tensor] = field(default_factory=dict)  # masks by AttentionParams.mask_key

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return self.tokens.stop - self.tokens.start

    @property
    def seq_len(self) -> int:
        """Length of the sequence up to the last token of this step."""
        return self.num_computed_tokens + self.num_tokens
