"""Trained soft prompts and LoRA adapters generate what PEFT generates with them, alone and in mixed batches."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import tuning
from adapter_batches import (
    ENGINES,
    AdapterRequest,
    EngineSetup,
    find_adapter,
    generate_all,
    make_setup,
    store_for,
    without_near_ties,
)

from tgis.batcher.sequence import StepPlan
from tgis.engines.padded.model import MAX_PREFILL_TOKENS


@pytest.fixture(scope="module", params=ENGINES)
def setup(request: pytest.FixtureRequest, glassllm_dir: Path) -> EngineSetup:
    return make_setup(request.param, glassllm_dir)


@pytest.mark.parametrize("chunk_tokens", [512, 24])
@pytest.mark.parametrize("name", ["glassllm", "glassllm-lora"])
def test_all_and_none_in_one_batch_generate_what_each_generates_alone(
    name: str,
    setup: EngineSetup,
    glassllm_dir: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunk_tokens: int,
) -> None:
    """With small chunks a padded prefill of eight sequences computes three columns at a time, through the prompts."""
    monkeypatch.setitem(MAX_PREFILL_TOKENS, "cpu", chunk_tokens)
    company: list[int] = []
    step = setup.engine.step

    def watched(plan: StepPlan) -> Any:
        company.append(len({row.adapter for row in plan.seqs}))
        return step(plan)

    monkeypatch.setattr(setup.engine, "step", watched)
    tuned = tuning.tuned(name, glassllm_dir, cache_dir)
    store, wanted = store_for(setup, tuned.store), without_near_ties(tuned.trained.continuations)
    random.Random(chunk_tokens).shuffle(wanted)
    wanted.sort(key=lambda one: len(one.tokens))  # all and none for one input, then for another
    jobs = [AdapterRequest(one.tokens, find_adapter(store, one), tuning.MAX_NEW_TOKENS) for one in wanted]
    room = setup.engine.info.token_capacity
    for bounds in (
        setup.bounds,
        dataclasses.replace(setup.bounds, max_batch_size=16, token_capacity=room, prefill_tokens=64, proposed_tokens=0),
    ):
        generated, _ = generate_all(EngineSetup(setup.engine, bounds, setup.ids), jobs, seed=chunk_tokens)
        assert generated == [one.generated for one in wanted]
    assert max(company) == len(tuning.TUNING_PLANS[name].trainings) + 1


@pytest.mark.parametrize("name", ["titles", "titles-lora"])
def test_an_encoder_decoder_generates_what_peft_generates(name: str, titles_dir: Path, cache_dir: Path) -> None:
    """With what was trained and without, alone and in one batch."""
    titles, tuned = make_setup("padded", titles_dir), tuning.tuned(name, titles_dir, cache_dir)
    store, wanted = store_for(titles, tuned.store), without_near_ties(tuned.trained.continuations)
    bare = {tuple(one.tokens): one.generated for one in wanted if not one.prompt}
    assert sum(one.generated != bare[tuple(one.tokens)] for one in wanted if one.prompt) >= 6
    assert len({tuple(one.generated) for one in wanted}) > len(wanted) // 2
    jobs = [AdapterRequest(one.tokens, find_adapter(store, one), tuning.MAX_NEW_TOKENS) for one in wanted]
    alone = [generate_all(titles, [job], eos=1)[0][0] for job in jobs]
    together, _ = generate_all(titles, jobs, seed=1, eos=1)
    assert alone == together == [one.generated for one in wanted]
