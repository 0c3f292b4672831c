"""A client's prediction changes no output, and is proposed where it is right."""

import random
from pathlib import Path

import msgspec
import pytest
from proposers import ForcedLookups, proposing
from random_requests import KINDS, WISHES
from tiny_models import (
    LONG,
    VOCAB_SIZE,
    WIDE_ENCODER_DECODERS,
    limits_of,
    make_model_from_config,
    make_wide_config,
    outcomes,
    paged_engine,
)

from tgis.ipc.request import Request

CONFIGS = {"Llama": make_wide_config("Llama", **LONG), "T5": WIDE_ENCODER_DECODERS["T5"]}


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_the_same(tmp_path: Path, name: str) -> None:
    engine, draw = paged_engine(make_model_from_config(CONFIGS[name], tmp_path), 8, dtype="float32"), random.Random(4)
    asked = [
        Request(n, draw.choices(range(3, VOCAB_SIZE), k=draw.randint(1, 40)), 16, False, kind, WISHES[n % len(WISHES)])
        for n, kind in enumerate(KINDS)
    ]
    expected, _ = outcomes(engine, limits_of(engine, 400, proposed_tokens=0), asked, None)
    for edits in (0, 1, 4, 16):
        predicted = []
        for request in asked:
            tokens = list(expected[request.id].tokens)
            for _ in range(edits):
                tokens[draw.randrange(len(tokens))] = draw.randrange(3, VOCAB_SIZE)
            predicted.append(msgspec.structs.replace(request, prediction=tokens[draw.randint(0, edits) // 2 :]))
        with proposing(ForcedLookups):
            answers, _ = outcomes(engine, limits_of(engine, 12, proposed_tokens=7), predicted, None)
        assert answers == expected
