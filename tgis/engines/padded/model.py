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
from tgis.engines.padded.kv_cache import KvCost
from tgis.engines.sampling.logprobs import first_input_fact, input_facts
from tgis.ipc.messages import TokenFacts

# Tokens of a pass beyond which a bigger one only takes longer: measured on two cores; an H200 needs thousands.
PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a loaded model is."""

    name: str  # of its class
    dtype: torch.dtype
    vocab_size: int
    encoder_decoder: bool


class PaddedModel(Protocol):
    """A loaded model, and what it keeps of its rows."""

    facts: ModelFacts
    positions: int  # tokens that the input, and the output, of a row may have
    embedding_size: int  # of a soft prompt's row; 0 where there can be none
    lora: LoraLayers  # whoever calls says what adapters the rows have

    @property
    def kv_cost(self) -> KvCost:
        """What the caches take at most; known after the first pass."""

    @property
    def held_bytes(self) -> int:
        """What the caches take now."""

    def join(self, rows: list[Sequence]) -> None:
        """Make room for new rows."""

    def prefill(self, rows: list[Sequence]) -> tuple[torch.Tensor, dict[int, list[TokenFacts]]]:
        """Compute all tokens of the newest rows: the logits after each one's last, [rows, V]; facts of inputs by id.

        Only rows that want facts and have generated nothing yet get some. Where it raises, other rows are unharmed.
        """

    def decode(self, newest: torch.Tensor) -> torch.Tensor:
        """Compute one more token of every row, ids [rows]; the logits after it, [rows, V]."""

    def leave(self, index: int) -> None:
        """Forget a row."""

    def clear(self) -> None:
        """Forget every row, and whatever a pass that stopped half way through has left."""

    def context(self, row: Sequence) -> list[int]:
        """The tokens of a row that a repetition penalty applies to, the newest last."""


def asking(rows: list[Sequence]) -> list[Sequence]:
    """Those that want facts of their input tokens, and have not got them before."""
    return [row for row in rows if row.request.details.inputs and not row.generated]


def in_pieces(
    rows: list[Sequence], piece: int, forward: Callable[[int, int], torch.Tensor]
) -> tuple[torch.Tensor, dict[int, list[TokenFacts]]]:
    """Compute the pending tokens of rows that end in one column: the last logits [rows, V], facts of input tokens.

    `forward` computes the columns from one to another, `piece` at a time: logits [rows, columns, V], or only the last
    column's if no row is asking.
    """
    width = max(row.pending for row in rows)
    details = asking(rows)
    inputs = {row.id: [first_input_fact(row.request.details)] for row in details}
    for start in range(0, width, piece):
        stop = min(start + piece, width)
        logits = forward(start, stop)
        for row in details:
            shift = width - row.pending  # columns of padding left of the row
            begin, end = max(start, shift), min(stop, width - 1)
            if begin < end:
                predicted = row.tokens[begin - shift + 1 : end - shift + 1]
                scores = logits[rows.index(row), begin - start : end - start]
                inputs[row.id] += input_facts(scores, predicted, row.request.details)
    return logits[:, -1], inputs
