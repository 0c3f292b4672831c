"""A seed's text in float32 is the same alone and beside others, also where kernels or padding change the rounding.

`python -m benchmarks.draws` does so with more texts and larger vocabularies, and in bfloat16.
"""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from batches import engine_options, limits
from tiny_models import VOCAB_SIZE, make_model, run_steps

from tgis.engines.base import Engine
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import Request, SamplingParams

TEXTS, TOKENS, ROWS = 12, 10, 8
SAMPLING = [
    SamplingParams(temperature=2.0),
    SamplingParams(temperature=1.5, top_p=0.95),
    SamplingParams(temperature=2.0, top_k=40, typical_p=0.9),
]


def texts(engine: Engine, requests: list[Request], *, padded: bool) -> list[list[int]]:
    """When they arrive at random steps."""
    bounds = limits(1600, padded=padded, max_batch_size=ROWS, block_size=0 if padded else 16)
    done: dict[int, list[int]] = {}
    for _, _, ended in run_steps(engine, bounds, requests, random.Random(2)):
        done |= {seq.id: seq.tokens[seq.prompt_length :] for seq in ended}
    return [done[request.id] for request in requests]


@pytest.mark.parametrize(
    ("name", "new_engine"), [("Llama", PagedEngine), ("Llama", PaddedEngine), ("Marian", PaddedEngine)]
)
@pytest.mark.parametrize("cpu_isa", ["auto", "none"])
def test_neighbours_change_no_text(
    name: str, new_engine: Callable[[EngineOptions], Engine], cpu_isa: str, tmp_path: Path
) -> None:
    draw = random.Random(1)
    options = engine_options(make_model(name, tmp_path), ROWS, threads=1)
    engine = new_engine(msgspec.structs.replace(options, cpu_isa=cpu_isa))
    engine.warm_up()
    requests = [
        Request(
            number,
            [draw.randrange(4, VOCAB_SIZE) for _ in range(draw.randint(1, 30))],
            TOKENS,
            sampling_params=msgspec.structs.replace(draw.choice(SAMPLING), seed=number),
        )
        for number in range(TEXTS)
    ]
    padded = new_engine is PaddedEngine
    alone = [texts(engine, [request], padded=padded)[0] for request in requests]
    assert texts(engine, requests, padded=padded) == alone
    assert len({tuple(text) for text in alone}) == TEXTS
