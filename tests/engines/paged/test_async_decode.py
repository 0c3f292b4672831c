"""Asynchronous decoding: whatever is planned next, every token is what the oracle samples from transformers' logits."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_runs import Broken, Launches, Subject, random_request
from fake_cuda_graphs import record
from tiny_models import make_model, paged_engine
from transformers import AutoModelForCausalLM

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.paged.batch import StaticInputs
from tgis.engines.paged.cuda_graphs import DecodeGraphs
from tgis.ipc.request import LogprobOptions, SamplingParams

SIZE, ROWS = 4, 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("Llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def subject(model_dir: Path) -> Iterator[Subject]:
    with torch.inference_mode():
        engine = paged_engine(model_dir, ROWS, async_decode=True, block_size=SIZE, dtype="float64")
        yield Subject(engine, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64).eval())


@pytest.fixture
def launches(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(subject.engine, monkeypatch)


def commit(plan: StepPlan, result: StepResult) -> None:
    """As the batcher does, but that rows go on after an end."""
    for row, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True):
        row.num_computed_tokens += count
    for row, tokens in zip(plan.sampled, result.tokens, strict=True):
        row.tokens += tokens


def test_a_steady_batch_takes_one_step_per_token(subject: Subject, launches: Launches) -> None:
    rng = random.Random(1)
    sampling = SamplingParams(temperature=1.0, min_new_tokens=20)
    rows = [Sequence(random_request(rng, n, 20, sampling_params=sampling), 0.0) for n in range(4)]
    for number, row in enumerate(rows):
        row.block_table = list(range(number * 10, number * 10 + 10))
    launched = []
    for _ in range(20):
        plan = StepPlan.compute_all(rows)
        before = len(launches.seen)
        commit(plan, subject.step(plan))
        launched.append([kind for kind, _ in launches.seen[before:]])
    assert launched == [["planned", "ahead"], *[["ahead"]] * 18, []]
    assert subject.engine._decoder._in_flight is None
    for row in rows:
        subject.check(row)


def test_sequences_with_invalid_logits_fail_alone(
    subject: Subject, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In flight or not; the token that they would have fed to the next step reaches nobody."""
    logits, poison = subject.engine.runner.run, range(40, 50)

    def poisoned(batch: Any) -> torch.Tensor:
        found = logits(batch)
        newest = batch.input_ids[batch.logits_indices]
        found[(newest >= poison.start) & (newest < poison.stop)] = float("nan")
        return found

    monkeypatch.setattr(subject.engine.runner, "run", poisoned)
    rng = random.Random(3)
    run = subject.run(100, prefix_cache=True, prefill_tokens=64)
    run.batcher.submit([random_request(rng, number, logprob_options=LogprobOptions()) for number in range(40)], 0.0)
    run.finish()
    assert {row.id for row in run.ended} | run.failed == set(range(40))
    assert not run.failed & {row.id for row in run.ended}
    assert len(run.failed) > 5
    for row in run.ended:
        assert not set(row.request.tokens[-1:] + row.tokens[row.prompt_length : -1]) & set(poison)
    assert len(launches.rows("ahead")) > 20


@pytest.mark.parametrize("failing", ["launch", "launch_next"])
def test_a_failed_launch_changes_no_result(
    subject: Subject, launches: Launches, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Of captured steps; some sequences are cancelled, others preempted."""
    runner = subject.engine.runner
    inputs = StaticInputs(ROWS, 64, runner.device)
    graphs = DecodeGraphs(runner._forward, inputs, subject.engine.info.token_capacity, record)
    monkeypatch.setattr(runner, "graphs", graphs)
    launch: Callable[..., Any] = getattr(subject.engine._decoder, failing)
    calls = 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 4 == 3:
            raise Broken
        return launch(*arguments)

    monkeypatch.setattr(subject.engine._decoder, failing, broken)
    rng = random.Random(4)
    run = subject.run(10, prefix_cache=True, prefill_tokens=9)  # some are preempted
    run.batcher.submit([random_request(rng, number) for number in range(40)], 0.0)
    cancelled = 0
    for number in range(40):
        run.step()
        cancelled += sum(run.cancel(row.id) for row in run.batcher.running[-1:] if number % 5 == 4)
    run.finish()
    assert len(run.ended) == 40 - cancelled < 40
    assert calls > 40
    assert run.batcher.take_counters().preemptions


@pytest.mark.skipif(torch.cuda.is_available(), reason="about CPUs")
def test_decoding_is_synchronous_on_cpus_by_default(model_dir: Path, subject: Subject) -> None:
    engine = paged_engine(model_dir, ROWS)
    assert (engine.info.lookahead, subject.engine.info.lookahead) == (0, 1)
    row = Sequence(random_request(random.Random(1), 1), 0.0)
    row.block_table = list(range(9))
    engine.step(StepPlan.compute_all([row]))
    assert engine._decoder._in_flight is None
