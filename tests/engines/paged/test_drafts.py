"""Models that draft: outputs are those without them, and drafts are what the models give."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batches import engine_options, limits
from proposers import ForcedDrafts, proposing
from random_requests import KINDS
from tiny_models import SHAPE_OF_512, VOCAB_SIZE, make_model_from_config, run_steps
from transformers import GPT2Config, LlamaConfig

from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

ROWS = 8
DETAILS = LogprobOptions(generated_tokens=True, logprobs=True, ranks=True, top_n_tokens=3)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models by name: the large one, and what drafts for it."""
    target = make_model_from_config(LlamaConfig(**SHAPE_OF_512), tmp_path_factory.mktemp("target"))
    other = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    return {"itself": target, "another": make_model_from_config(other, tmp_path_factory.mktemp("other"))}


def load(paths: dict[str, Path], drafter: str, **changes: Any) -> PagedEngine:
    options = msgspec.structs.replace(engine_options(paths["itself"], ROWS, threads=2), dtype="bfloat16", **changes)
    options = msgspec.structs.replace(options, speculation="auto", speculator_path=str(paths[drafter]))
    engine = PagedEngine(options)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module", params=["itself", "another"])
def engine(request: pytest.FixtureRequest, paths: dict[str, Path]) -> PagedEngine:
    return load(paths, request.param)


def outcomes(
    engine: PagedEngine, asked: list[Request], drafted: int, blocks: int, draw: random.Random
) -> tuple[list[Any], Counter[str]]:
    bounds = limits(
        blocks * 16,
        prefix_cache=True,
        proposed_tokens=15,
        drafted_tokens=drafted,
        padded=False,
        block_size=16,
        prefill_tokens=50,
        max_batch_size=ROWS,
    )
    found: dict[int, Any] = {request.id: ([], []) for request in asked}
    counts: Counter[str] = Counter()
    for plan, result, _ in run_steps(engine, bounds, asked, draw):
        logprobs = result.logprobs or [[]] * len(plan.sampled)
        for row, tokens, facts in zip(plan.sampled, result.tokens, logprobs, strict=True):
            kept = row.num_generated_tokens - len(found[row.id][0])
            found[row.id][0].extend(tokens[:kept])
            found[row.id][1].extend(facts[:kept])
            if row.id in plan.drafts:
                counts["asked"] += plan.drafts[row.id]
                counts["drafted"] += len(plan.proposals.get(row.id, []))
                counts["kept"] += len(tokens) - 1
        counts["preempted"] += sum(not row.finished for row in plan.to_release)
    return [found[request.id] for request in asked], counts


def requests(draw: random.Random, sampling: list[SamplingParams]) -> list[Request]:
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice([1, 9, 40, 90]))] for _ in sampling]
    prompts[0][:17] = prompts[-1][:17]
    seeded = [msgspec.structs.replace(each, seed=draw.getrandbits(64)) for each in sampling]
    return [Request(at, prompt, 24, False, seeded[at], DETAILS) for at, prompt in enumerate(prompts)]


def test_drafts_change_nothing(engine: PagedEngine) -> None:
    """With every way to sample, few blocks, and prefixes of the cache."""
    draw = random.Random(4)
    asked = requests(draw, [*KINDS, *KINDS])
    expected, none = outcomes(engine, asked, 0, 100, draw)
    assert not none["asked"]
    preempted = 0
    for most, blocks in ((1, 100), (4, 14), (4, 16), (15, 100)):
        with proposing(ForcedDrafts):
            found, counts = outcomes(engine, asked, most, blocks, draw)
        for request, one, other in zip(asked, found, expected, strict=True):
            assert one == other, (most, request)
        assert counts["drafted"] > 100
        preempted += counts["preempted"]
    assert preempted


def test_a_model_drafts_what_it_would_choose_itself(paths: dict[str, Path]) -> None:
    engine, draw = load(paths, "itself"), random.Random(5)
    with proposing(ForcedDrafts):
        _, counts = outcomes(engine, requests(draw, [SamplingParams()] * 6), 5, 40, draw)
    assert counts["kept"] == counts["drafted"] > 80
