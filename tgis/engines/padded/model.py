"""What the padded engine asks of a model: passes over rows that join and leave, and the caches between them.

Rows have numbers, 0 to n-1 without gaps, which are the same here and in the engine: new rows come last, and the last
one takes the place of each that leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tgis.batcher.sequence import Sequence
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.padded.kv_cache import KvCacheCost
from tgis.engines.sampling.logprobs import first_prompt_logprobs, prompt_logprobs
from tgis.ipc.request import TokenLogprobs

# Tokens of a pass beyond which a bigger one only takes longer: measured on two cores; an H200 needs thousands.
MAX_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is."""

    model_class: str  # of its class
    dtype: torch.dtype
    vocab_size: int
    encoder_decoder: bool


class PaddedModel(Protocol):
    """A loaded model, and what it keeps of its rows."""

    info: ModelInfo
    max_positions: int  # tokens that the input, and the output, of a row may have
    embedding_size: int  # of a soft prompt's row; 0 where there can be none
    lora: LoraLayers  # whoever calls says what adapters the rows have

    @property
    def kv_cache_cost(self) -> KvCacheCost:
        """What the caches take at most; known after the first pass."""

    @property
    def kv_cache_bytes(self) -> int:
        """What the caches take now."""

    def append(self, rows: list[Sequence]) -> None:
        """Make room for new rows."""

    def prefill(self, rows: list[Sequence]) -> tuple[torch.Tensor, dict[int, list[TokenLogprobs]]]:
        """Compute all tokens of the newest rows: the logits after each one's last, [rows, V]; facts of inputs by id.

        Only rows that want facts and have generated nothing yet get some. Where it raises, other rows are unharmed.
        """

    def decode(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """Compute one more token of every row, ids [rows]; the logits after it, [rows, V]."""

    def remove(self, index: int) -> None:
        """Forget a row."""

    def clear(self) -> None:
        """Forget every row, and whatever a pass that stopped half way through has left."""

    def token_history(self, row: Sequence) -> list[int]:
        """The tokens of a row that a repetition penalty applies to, the newest last."""


def wanting_prompt_logprobs(rows: list[Sequence]) -> list[Sequence]:
    """Those that want facts of their input tokens, and have not got them before."""
    return [row for row in rows if row.request.logprob_options.input_tokens and not row.num_generated_tokens]


def chunked_prefill(
    rows: list[Sequence], chunk_size: int, forward: Callable[[int, int], torch.Tensor]
) -> tuple[torch.Tensor, dict[int, list[TokenLogprobs]]]:
    """Compute the pending tokens of rows that end in one column: the last logits [rows, V], facts of input tokens.

    `forward` computes the columns from one to another, `piece` at a time: logits [rows, columns, V], or only the last
    column's if no row is asking.
    """
    width = max(row.num_uncomputed_tokens for row in rows)
    wanting = wanting_prompt_logprobs(rows)
    found = {row.id: [first_prompt_logprobs(row.request.logprob_options)] for row in wanting}
    for start in range(0, width, chunk_size):
        stop = min(start + chunk_size, width)
        logits = forward(start, stop)
        for row in wanting:
            padding = width - row.num_uncomputed_tokens  # columns of padding left of the row
            begin, end = max(start, padding), min(stop, width - 1)
            if begin < end:
                predicted = row.tokens[begin - padding + 1 : end - padding + 1]
                scores = logits[rows.index(row), begin - start : end - start]
                found[row.id] += prompt_logprobs(scores, predicted, row.request.logprob_options)
    return logits[:, -1], found
