"""Soft prompts in a pass: the embeddings of token ids, those of placeholders replaced by those of the row's prompt."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tgis.batcher.sequence import Sequence as Row
from tgis.prompts.soft_prompt import SoftPrompt


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Virtual tokens of one row, and where they stand among the ids of the pass."""

    row: int
    start: int
    embeddings: torch.Tensor  # [tokens, H]


def embed_with_prompts(
    embed_tokens: torch.nn.Module, ids: torch.Tensor, spans: Iterable[PromptSpan]
) -> torch.Tensor | None:
    """What the model gets in place of `ids` [rows, columns]: [rows, columns, H]; None where there are no spans.

    As in PEFT, prompts stand beside what the table gives, whatever a model does to both afterwards.
    """
    found = None
    for span in spans:
        found = embed_tokens(ids) if found is None else found
        found[span.row, span.start : span.start + len(span.embeddings)] = span.embeddings
    return found


def decoder_prompt(row: Row) -> torch.Tensor | None:
    """What stands before all that a decoder sees of a row, if anything: [tokens, H]."""
    return row.adapter.decoder if isinstance(row.adapter, SoftPrompt) else None


def encoder_prompt(row: Row) -> torch.Tensor | None:
    """What stands before the input of an encoder-decoder's row, if anything: [tokens, H]."""
    return row.adapter.encoder if isinstance(row.adapter, SoftPrompt) else None


def padded_spans(
    prompts: Sequence[torch.Tensor | None], lengths: Sequence[int], start: int, stop: int
) -> Iterator[PromptSpan]:
    """Those in columns `start` to `stop` of rows of these lengths that end in one column and begin with the prompts."""
    width = max(lengths)
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        left = width - length  # columns of padding
        begin, end = max(start, left), min(stop, left + (0 if prompt is None else len(prompt)))
        if begin < end:
            assert prompt is not None
            yield PromptSpan(index, begin - start, prompt[begin - left : end - left])


def flat_spans(work: Iterable[tuple[Row, int]]) -> Iterator[PromptSpan]:
    """Those of rows that stand one behind the other, each with so many of its pending tokens."""
    at = 0
    for row, count in work:
        end = min(row.num_computed_tokens + count, row.request.soft_prompt_length)
        if row.num_computed_tokens < end:
            yield PromptSpan(0, at, row.adapter.decoder[row.num_computed_tokens : end])
        at += count
