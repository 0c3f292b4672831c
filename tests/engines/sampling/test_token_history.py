"""The tokens that a repetition penalty applies to."""

import torch

from tgis.engines.sampling.penalties import TokenHistory


def test_every_token_is_there_however_long_a_row_becomes() -> None:
    tokens = [[77, 1, 2, 3], [77, *range(88)]]
    history = TokenHistory(tokens, torch.device("cpu"))
    for token in range(1000, 1400):
        newest = [token, token + 1]
        for own, new in zip(tokens, newest, strict=True):
            own.append(new)
        history.append(torch.tensor(newest))
        assert [set(ids) for ids in history.ids.tolist()] == [set(own) for own in tokens]
