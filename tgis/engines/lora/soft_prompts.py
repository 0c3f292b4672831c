"""Soft prompts in a forward pass, where they replace the embeddings of placeholder tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.prompts.soft_prompt import SoftPrompt


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """The virtual tokens of one sequence among the ids of the pass."""

    row: int
    start: int
    embeddings: Tensor  # [tokens, H]


def model_inputs(embed_tokens: torch.nn.Module, ids: Tensor, spans: Iterable[PromptSpan]) -> dict[str, Tensor]:
    """The argument of a pass for `ids` [rows, columns]: the ids, or embeddings [rows, columns, H] if there are spans.

    As in PEFT, prompts replace the output of the embedding layer, before the model scales it, for example.
    """
    embeddings = None
    for span in spans:
        embeddings = embed_tokens(ids) if embeddings is None else embeddings
        embeddings[span.row, span.start : span.start + len(span.embeddings)] = span.embeddings
    return {"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings}


def decoder_prompt(seq: Sequence) -> Tensor | None:
    """The soft prompt of a decoder, [tokens, H]."""
    return seq.adapter.decoder if isinstance(seq.adapter, SoftPrompt) else None


def encoder_prompt(seq: Sequence) -> Tensor | None:
    """The soft prompt of an encoder, [tokens, H]."""
    return seq.adapter.encoder if isinstance(seq.adapter, SoftPrompt) else None


def padded_spans(prompts: list[Tensor | None], lengths: list[int], start: int, stop: int) -> Iterator[PromptSpan]:
    """Spans in the columns `start` to `stop` of right-aligned sequences, which begin with these prompts."""
    width = max(lengths)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        padding = width - length
        begin, end = max(start, padding), min(stop, padding + (0 if prompt is None else len(prompt)))
        if begin < end:
            assert prompt is not None
            yield PromptSpan(row, begin - start, prompt[begin - padding : end - padding])


def flat_spans(work: Iterable[tuple[Sequence, range]]) -> Iterator[PromptSpan]:
    """Spans of a batch without padding, from its sequences and the decoder positions that they compute."""
    start = 0
    for seq, positions in work:
        prompt = decoder_prompt(seq)
        if prompt is not None and positions.start < len(prompt):
            yield PromptSpan(0, start, prompt[positions.start : positions.stop])
        start += len(positions)


def encoder_input(seq: Sequence) -> list[int]:
    """Placeholders of the encoder's soft prompt, then the input."""
    prompt = encoder_prompt(seq)
    virtual = 0 if prompt is None else len(prompt)
    return seq.tokens[seq.request.soft_prompt_length - virtual : seq.prompt_length]
