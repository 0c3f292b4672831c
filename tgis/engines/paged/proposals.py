"""Proposed tokens in a step: each is a row of its own, that of a sequence which has got all tokens before it already.

So a row is computed, and sampled, as it would be if its sequence had come there one token at a time; it shares the
block table of the sequence. What the rows choose is kept as far as they follow from one another.
"""

from collections.abc import Iterator
from copy import copy
from itertools import count

import msgspec

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult

_row_ids = count(-1, -1)  # none twice: nothing of a row is reused in the next step


def cut_by_grammars(plan: StepPlan) -> None:
    """Leave out the proposed tokens that the grammar of an output forbids, and those behind them."""
    for seq in plan.seqs:
        if seq.grammar is not None and (tokens := plan.proposals.get(seq.id)):
            del tokens[seq.grammar.num_allowed(seq.tokens[seq.prompt_length :], tokens) :]


def with_proposals(plan: StepPlan) -> StepPlan:
    """The step with a row for each proposed token of a sequence, behind it."""
    assert not plan.has_prefill
    rows = [row for seq in plan.seqs for row in (seq, *_rows(seq, plan.proposals.get(seq.id, [])))]
    return StepPlan(rows, [1] * len(rows), rows, has_prefill=False)


def _rows(seq: Sequence, proposed: list[int]) -> Iterator[Sequence]:
    for end in range(1, len(proposed) + 1):
        row = copy(seq)
        row.request = msgspec.structs.replace(seq.request, id=next(_row_ids))
        row.tokens = seq.tokens + proposed[:end]
        row.num_computed_tokens = len(row.tokens) - 1
        yield row


def keep_what_follows(plan: StepPlan, rows: StepPlan, result: StepResult) -> StepResult:
    """The result of a step from that of its rows: a row counts if all tokens that were proposed before it have come. A
    row that failed is left to the next step, where it is the first of its sequence.
    """
    kept = StepResult([], [], result.prompt_logprobs)
    first = 0
    for seq in plan.sampled:
        assert rows.sampled[first] is seq
        proposed = plan.proposals.get(seq.id, [])
        last = first
        for token in proposed:
            if result.tokens[last] != [token] or not result.tokens[last + 1]:
                break
            last += 1
        kept.tokens.append([token for tokens in result.tokens[first : last + 1] for token in tokens])
        if result.logprobs:
            kept.logprobs.append([facts for own in result.logprobs[first : last + 1] for facts in own])
        if seq.id in result.failed:
            kept.failed[seq.id] = result.failed[seq.id]
        first += 1 + len(proposed)
    return kept
