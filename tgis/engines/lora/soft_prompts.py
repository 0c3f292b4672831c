"""Soft prompts in a forward pass, where they replace the embeddings of placeholder tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.prompts.soft_prompt import SoftPrompt


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Virtual tokens of one sequence, and their place among the ids of the pass."""

    row: int
    start: int
    embeddings: Tensor  # [tokens, H]


def embed_with_prompts(embed_tokens: torch.nn.Module, ids: Tensor, spans: Iterable[PromptSpan]) -> Tensor | None:
    """`inputs_embeds` [rows, columns, H] for `ids` [rows, columns]; None where there are no spans.

    Like in PEFT, prompts replace the output of the embedding layer, before the model scales it, for example.
    """
    found = None
    for span in spans:
        found = embed_tokens(ids) if found is None else found
        found[span.row, span.start : span.start + len(span.embeddings)] = span.embeddings
    return found


def decoder_prompt(seq: Sequence) -> Tensor | None:
    """The soft prompt of a decoder, [tokens, H]."""
    return seq.adapter.decoder if isinstance(seq.adapter, SoftPrompt) else None


def encoder_prompt(seq: Sequence) -> Tensor | None:
    """The soft prompt of an encoder, [tokens, H]."""
    return seq.adapter.encoder if isinstance(seq.adapter, SoftPrompt) else None


def padded_spans(prompts: list[Tensor | None], lengths: list[int], start: int, stop: int) -> Iterator[PromptSpan]:
    """Spans in the columns `start` to `stop` of right-aligned sequences that begin with the prompts."""
    width = max(lengths)
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        padding = width - length
        begin, end = max(start, padding), min(stop, padding + (0 if prompt is None else len(prompt)))
        if begin < end:
            assert prompt is not None
            yield PromptSpan(row, begin - start, prompt[begin - padding : end - padding])


def flat_spans(scheduled: Iterable[tuple[Sequence, int]]) -> Iterator[PromptSpan]:
    """Spans of a batch without padding, of sequences and their scheduled tokens."""
    start = 0
    for seq, num_tokens in scheduled:
        end = min(seq.num_computed_tokens + num_tokens, seq.request.soft_prompt_length)
        if seq.num_computed_tokens < end:
            yield PromptSpan(0, start, seq.adapter.decoder[seq.num_computed_tokens : end])
        start += num_tokens
