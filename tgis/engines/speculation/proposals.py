"""Verification of proposed tokens: each is a separate row of the step, a copy of its sequence that ends with the token.

A row is computed and sampled as in a step without proposals, and shares the block table of its sequence. The sampled
tokens are kept up to the first that differs from its proposal.
"""

from collections.abc import Collection, Iterator
from copy import copy
from itertools import count
from typing import Any

import msgspec

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult

_row_ids = count(-1, -1)  # unique, so that the next step reuses nothing of a row


def with_proposals(plan: StepPlan) -> StepPlan:
    """The step with a row for each proposed token of a sequence, behind it."""
    assert not plan.has_prefill
    rows = []
    for seq in plan.seqs:
        proposed = plan.proposals.get(seq.id, [])
        rows += [seq, *rows_of(seq, seq.tokens + proposed, len(seq.tokens))]
    return StepPlan(rows, [1] * len(rows), rows, has_prefill=False)


def rows_of(seq: Sequence, tokens: list[int], first: int) -> Iterator[Sequence]:
    """A row for each of the tokens of a sequence from the one at `first` on, which computes that token."""
    for position in range(first, len(tokens)):
        row = copy(seq)
        row.request = msgspec.structs.replace(seq.request, id=next(_row_ids))
        row.tokens, row.num_computed_tokens = tokens[: position + 1], position
        yield row


def keep_what_follows(plan: StepPlan, rows: StepPlan, result: StepResult) -> StepResult:
    """The result of a step from that of its rows: a row counts if all proposals before it were sampled. A failed row
    ends its sequence's tokens; the next step computes it again as the first row.
    """
    kept = StepResult([], [], result.prompt_logprobs)
    first = 0
    for seq in plan.sampled:
        assert rows.sampled[first] is seq
        proposed = plan.proposals.get(seq.id, [])
        last = first
        for token in proposed:
            if result.tokens[last] != [token] or rows.sampled[last + 1].id in result.failed:
                break
            last += 1
        kept.tokens.append([token for tokens in result.tokens[first : last + 1] for token in tokens])
        if result.logprobs:
            kept.logprobs.append([logprobs for row in result.logprobs[first : last + 1] for logprobs in row])
        if seq.id in result.failed:
            kept.failed[seq.id] = result.failed[seq.id]
        first += 1 + len(proposed)
    return kept


class Drafter:
    """Drafts tokens in the steps of an engine; this one drafts none."""

    max_tokens = 0
    caches: tuple[Any, ...] = ()  # further KV caches, with the same blocks

    def warm_up(self, num_blocks: int) -> None:
        """Prepare for a KV cache of this many blocks."""

    def draft(self, plan: StepPlan) -> dict[int, list[int]]:  # noqa: ARG002
        """Drafts for the sequences that the plan asks for, by request id; some may be missing or shorter."""
        return {}

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """The step has succeeded."""

    def release(self, seqs: Collection[Sequence]) -> None:
        """Forget sequences."""
