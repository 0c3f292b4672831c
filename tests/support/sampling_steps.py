"""One sampling step of a batch, its result by row."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tgis.batcher.sequence import Sequence
from tgis.engines.base import StepResult
from tgis.engines.sampling.draws import SamplingOps
from tgis.engines.sampling.sampler import BatchSampler
from tgis.ipc.request import TokenLogprobs

PLAIN_OPS = SamplingOps()


class Sampled(NamedTuple):
    tokens: list[int]  # -1 where the scores are unusable
    logprobs: list[TokenLogprobs | None]  # empty when no row asks
    invalid: list[int]  # rows whose scores are unusable


def sample_batch(
    seqs: list[Sequence],
    logits: torch.Tensor,
    histories: list[list[int]],
    eos: Iterable[int] = (),
    ops: SamplingOps = PLAIN_OPS,
) -> Sampled:
    """By a new sampler; repetition penalties apply to the `histories` and the outputs."""
    by_seq = {
        id(seq): [*history, *seq.tokens[seq.prompt_length :]] for seq, history in zip(seqs, histories, strict=True)
    }
    made = BatchSampler(logits.shape[1], eos, torch.device("cpu"), lambda seq: by_seq[id(seq)], ops)
    return by_row(made.sample_and_wait(seqs, logits.clone()), seqs)


def by_row(result: StepResult, seqs: list[Sequence]) -> Sampled:
    invalid = [row for row, tokens in enumerate(result.tokens) if not tokens]
    assert result.failed.keys() == {seqs[row].id for row in invalid}
    assert all(len(own) <= 1 for own in result.tokens)
    assert all(len(own) <= 1 for own in result.logprobs)
    tokens = [own[0] if own else -1 for own in result.tokens]
    return Sampled(tokens, [own[0] if own else None for own in result.logprobs], invalid)
