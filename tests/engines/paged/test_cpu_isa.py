"""The same greedy tokens with the kernels of every instruction set and without any."""

import random
from pathlib import Path

import msgspec
import pytest
from batches import engine_options, limits
from cpu_kernels import kernels_of
from tiny_models import generate_all, greedy_requests, make_model, tokens_alone

from tgis.engines.kernels.cpu.library import ISAS
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.request import Request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("Llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return greedy_requests(6, 8, random.Random(3), longest=70)


@pytest.fixture(scope="module")
def expected(model: Path, requests: list[Request]) -> list[list[int]]:
    return tokens_alone(model, requests)


@pytest.mark.parametrize("isa", ["none", *ISAS])
def test_every_instruction_set_gives_transformers_tokens(
    model: Path, requests: list[Request], expected: list[list[int]], isa: str
) -> None:
    if isa != "none":
        kernels_of(isa)
    options = msgspec.structs.replace(engine_options(model, 4, threads=2), cpu_isa=isa)
    engine = PagedEngine(options)
    bounds = limits(200, padded=False, block_size=16, max_batch_size=4, prefill_tokens=20)
    assert generate_all(engine, bounds, requests, random.Random(1)) == expected
