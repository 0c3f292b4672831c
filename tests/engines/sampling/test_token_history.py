"""The tokens that a repetition penalty applies to."""

import pytest
import torch
from batches import request

from tgis.batcher.sequence import Sequence
from tgis.engines.sampling.token_history import TokenHistory
from tgis.ipc.request import LogprobOptions, Request, SamplingParams


def row(number: int, length: int, penalty: float) -> Sequence:
    return Sequence(
        Request(number, list(range(length)), 500, False, SamplingParams(repetition_penalty=penalty), LogprobOptions()),
        0,
    )


def test_every_token_is_there_however_long_a_row_becomes() -> None:
    rows = [row(1, 5, 1.2), row(2, 90, 1.0)]
    context = TokenHistory(lambda row: [77, *row.tokens[2:]], torch.device("cpu"))
    context.set_seqs(rows)
    for token in range(1000, 1400):
        for each in rows:
            each.tokens.append(token + each.id)
        context.append(torch.tensor([each.tokens[-1] for each in rows]))
        assert [set(ids) for ids in context.ids.tolist()] == [{77, *each.tokens[2:]} for each in rows]


def test_nothing_is_kept_where_no_row_has_a_penalty() -> None:
    rows = [Sequence(request(1), 0), Sequence(request(2), 0)]
    context = TokenHistory(lambda row: pytest.fail("nobody asked"), torch.device("cpu"))
    context.set_seqs(rows)
    context.append(torch.tensor([3, 4]))
    assert context.ids.shape == (2, 0)
