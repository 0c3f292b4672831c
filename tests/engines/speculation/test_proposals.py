"""Which tokens of a step's rows are kept."""

from dataclasses import replace
from typing import Any

import pytest

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.speculation.proposals import keep_what_follows, with_proposals
from tgis.ipc.messages import FailureKind
from tgis.ipc.request import LogprobOptions, Request, TokenLogprobs

WHY = FailureKind.GRAMMAR, "no text matches"


@pytest.mark.parametrize(
    ("proposed", "chosen", "failed", "kept"),
    [
        ([], [5], [], [5]),
        ([5, 6], [5, 6, 7], [], [5, 6, 7]),
        ([5, 6], [5, 7, 8], [], [5, 7]),
        ([5, 6], [6, 6, 7], [], [6]),
        ([5, 6], [5, None, 7], [1], [5]),  # scores that are not finite
        ([5, 6], [5, 6, 7], [1], [5]),  # a grammar that could not say what may follow
        ([5, 6], [5, 6, 7], [2], [5, 6]),
        ([5, 6], [4, 6, 7], [1, 2], [4]),
        ([5, 6], [5, 6, 7], [0], None),
    ],
)
@pytest.mark.parametrize("details", [False, True])
def test_what_follows_is_kept(
    proposed: list[int], chosen: list[int | None], failed: list[int], kept: list[int] | None, details: bool
) -> None:
    """Beside a sequence before it and one behind, for which nothing is proposed."""
    options = LogprobOptions(generated_tokens=True, logprobs=details)
    seqs = [Sequence(Request(number, [1, 2], 9, logprob_options=options), 0.0) for number in range(3)]
    for seq in seqs:
        seq.num_computed_tokens = 1
    plan = replace(StepPlan.compute_all(seqs), proposals={1: proposed} if proposed else {})
    rows = with_proposals(plan)
    tokens = [3, *chosen, 4]
    assert [row.tokens for row in rows.seqs[1:-1]] == [[1, 2, *proposed[:count]] for count in range(len(chosen))]
    facts: list[Any] = [[TokenLogprobs(-float(token))] if token else [] for token in tokens] if details else []
    result = StepResult([[token] if token else [] for token in tokens], facts)
    result.failed = {rows.sampled[1 + row].id: WHY for row in failed}
    found = keep_what_follows(plan, rows, result)
    assert found.failed == ({} if kept else {1: WHY})
    assert (found.tokens[0], found.tokens[2]) == ([3], [4])
    if kept:
        assert found.tokens[1] == kept
        assert found.logprobs == [[TokenLogprobs(-float(token)) for token in own] for own in found.tokens] * details
