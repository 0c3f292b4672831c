"""The same greedy tokens with the kernels of every instruction set and without any."""

import random
from pathlib import Path

import msgspec
import pytest
import torch
from batches import engine_options, limits
from cpu_kernels import kernels_of
from tiny_models import VOCAB_SIZE, generate_all, make_model
from transformers import AutoModelForCausalLM

from tgis.engines.kernels.cpu.library import ISAS
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("Llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    draw = random.Random(3)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 16, 40, 70)]
    return [
        Request(n, prompt, NEW_TOKENS, False, SamplingParams(), LogprobOptions()) for n, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def expected(model: Path, requests: list[Request]) -> list[list[int]]:
    """The tokens that transformers generates for each request alone."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    outputs = [
        network.generate(
            torch.tensor([request.tokens]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
        for request in requests
    ]
    return [output[0, len(request.tokens) :].tolist() for output, request in zip(outputs, requests, strict=True)]


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
