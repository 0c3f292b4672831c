"""Random arrivals, cancellations and preemptions: every sequence gets what it should get alone.

In float64 where the model's attention is computed in it.
"""

import random
from collections import Counter
from itertools import product

import msgspec
import pytest
import torch
from checked_runs import Run, Subject, random_request
from slow_cases import slow_except
from tiny_models import VOCAB_SIZE, make_model, paged_engine
from transformers import AutoModelForCausalLM

from tgis.ipc.request import Request

MAX_NEW_TOKENS, MAX_BATCH_SIZE = 20, 6
SALTS = (b"", b"", b"tenant")


def _prompts() -> list[list[int]]:
    """Unrelated ones, some with shared prefixes, one that is the prefix of another."""
    rng = random.Random(7)
    own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 5, 9, 16, 24)]
    shared = [own[5][:cut] + own[other][:more] for cut, other, more in ((8, 4, 9), (16, 3, 5), (13, 4, 3), (16, 0, 1))]
    return [*own, *shared, own[5][:16]]


PROMPTS = _prompts()


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    name, block_size, dtype, async_decode = request.param
    directory = make_model(name, tmp_path_factory.mktemp("model"))
    engine = paged_engine(directory, MAX_BATCH_SIZE, async_decode=async_decode, block_size=block_size, dtype=dtype)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    return Subject(engine, reference, 1e-4 if dtype == "float32" else 1e-6)


def _requests(rng: random.Random) -> list[Request]:
    return [
        random_request(rng, n, rng.randint(1, MAX_NEW_TOKENS), tokens=rng.choice(PROMPTS), cache_salt=rng.choice(SALTS))
        for n in range(8)
    ]


def _interleave(rng: random.Random, run: Run, to_come: list[Request]) -> Counter[str]:
    """Requests that arrive at any time; some are cancelled. The batcher's counters, and how many of those had run."""
    left = 0
    while to_come or not run.batcher.idle:
        while to_come and (run.batcher.idle or rng.random() < 0.3):
            run.batcher.submit([to_come.pop(0)], 0.0)
        if rng.random() < 0.05:
            left += run.cancel(rng.randrange(8))
        run.step()
    run.finish()
    return Counter({**msgspec.structs.asdict(run.batcher.take_counters()), "left": left})


SYNCHRONOUS, ASYNCHRONOUS = ("Llama", 2, "float64", False), ("Llama", 2, "float64", True)
FAST = [(SYNCHRONOUS, True, True, range(2, 5)), (ASYNCHRONOUS, True, False, range(2, 5))]
SLOW = [(*case, range(2, 50)) for case in product((SYNCHRONOUS, ASYNCHRONOUS), (False, True), (False, True))]


@pytest.mark.parametrize(
    ("subject", "few_blocks", "prefix_cache", "seeds"),
    slow_except(FAST, FAST + SLOW),
    indirect=["subject"],
)
def test_interleavings(subject: Subject, few_blocks: bool, prefix_cache: bool, seeds: range) -> None:
    total = Counter[str]()
    for seed in seeds:
        rng = random.Random(seed)
        blocks = rng.randint(22, 30) if few_blocks else 200  # the largest request has 22
        chunk, rows = rng.choice([1, 2, 3, 5, 8, 13, 64]), rng.randint(2, MAX_BATCH_SIZE)
        run = subject.run(blocks, prefill_tokens=chunk, prefix_cache=prefix_cache, max_batch_size=rows)
        total += _interleave(rng, run, _requests(rng))
    assert total["left"] > 0
    assert (total["preemptions"] >= len(seeds) // 2) == few_blocks
    assert (total["prefix_cache_hits"] > len(seeds)) == prefix_cache
    assert total["queue_jumps"] or not few_blocks
