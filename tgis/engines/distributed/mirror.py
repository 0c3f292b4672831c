"""Steps as the other ranks get them: what is new since the last one, however long the sequences are.

Rank 0 has the sequences of the batcher, the others mirror them: tokens, blocks and whatever else logits depend on.
"""

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import torch

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.ipc.messages import EngineInfo
from tgis.ipc.request import Request
from tgis.prompts.soft_prompt import SoftPrompt


class NewSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that the other ranks do not know, or no longer."""

    request: Request  # without who asked, and until when
    decoder_prompt: bytes = b""  # embeddings of a soft prompt as they lie in memory
    encoder_prompt: bytes = b""

    @classmethod
    def of(cls, seq: Sequence) -> "NewSequence":
        request = msgspec.structs.replace(seq.request, client=b"", cache_salt=b"", deadline=None, answer_deadline=None)
        prompt = seq.adapter
        parts = (prompt.decoder, prompt.encoder) if isinstance(prompt, SoftPrompt) else ()
        return cls(request, *(b"" if part is None else _bytes(part) for part in parts))


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence in a step: what it computes, and what has been added to it."""

    id: int
    count: int  # of tokens to compute
    num_computed_tokens: int
    tokens: list[int]  # generated since
    num_kept_blocks: int  # of those that the other ranks know
    blocks: list[int]  # after these


class StepInput(msgspec.Struct, frozen=True, tag="step"):
    """A plan as it is sent to the other ranks."""

    released: list[int]  # ids, before the new ones, which may be the same
    new: list[NewSequence]
    rows: list[Row]


@dataclass(slots=True)
class _Sent:
    """What the other ranks know of a sequence. Its block table only grows, or is replaced by another list."""

    num_tokens: int
    block_table: list[int]
    num_blocks: int = 0


class Deltas:
    """Rank 0's side: remembers what has been sent."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._released: list[int] = []

    def release(self, seqs: Collection[Sequence]) -> None:
        """Forget sequences, the other ranks with the next step; unknown ones are ignored."""
        self._released += [seq.id for seq in seqs if self._sent.pop(seq.id, None)]

    def encode(self, plan: StepPlan) -> StepInput:
        """The message for the next step."""
        new = [seq for seq in plan.seqs if seq.id not in self._sent]
        self._sent |= {seq.id: _Sent(seq.prompt_length, seq.block_table) for seq in new}
        rows = [self._row(seq, count) for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)]
        released, self._released = self._released, []
        return StepInput(released, [NewSequence.of(seq) for seq in new], rows)

    def _row(self, seq: Sequence, count: int) -> Row:
        sent, table = self._sent[seq.id], seq.block_table
        kept = min(sent.num_blocks, len(table))
        if table is not sent.block_table and table[:kept] != sent.block_table[:kept]:
            kept = 0
        row = Row(seq.id, count, seq.num_computed_tokens, seq.tokens[sent.num_tokens :], kept, table[kept:])
        self._sent[seq.id] = _Sent(len(seq.tokens), table, len(table))
        return row


class Mirror:
    """The side of the other ranks: their copies of the sequences."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._seqs: dict[int, Sequence] = {}

    def plan(self, step: StepInput) -> StepPlan:
        """The plan of rank 0, over the copies."""
        for request_id in step.released:
            del self._seqs[request_id]
        for new in step.new:
            seq = self._seqs[new.request.id] = Sequence(new.request, 0.0)
            parts = (self._embeddings(new.decoder_prompt), self._embeddings(new.encoder_prompt))
            if new.decoder_prompt or new.encoder_prompt:
                seq.adapter = SoftPrompt(0, *parts, encoder_decoder=self._info.encoder_decoder)
        return StepPlan.of([self._updated(row) for row in step.rows], [row.count for row in step.rows])

    def _updated(self, row: Row) -> Sequence:
        seq = self._seqs[row.id]
        seq.tokens += row.tokens
        seq.num_computed_tokens = row.num_computed_tokens
        if row.num_kept_blocks < len(seq.block_table):
            seq.block_table = seq.block_table[: row.num_kept_blocks]  # a new list: engines expect others only to grow
        seq.block_table += row.blocks
        return seq

    def _embeddings(self, data: bytes) -> torch.Tensor | None:
        if not data:
            return None
        rows = torch.frombuffer(bytearray(data), dtype=getattr(torch, self._info.dtype))
        return rows.view(-1, self._info.embedding_size).to(self._info.device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(torch.uint8).numpy())
