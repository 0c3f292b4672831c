"""The real engine when steps fail: what survives is what each request gives alone."""

import pytest
import torch
from batches import engine_options
from step_failures import Failing, Outcome, check, requests, run

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.padded.causal_lm import CausalLM
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.padded.kv_cache import PaddedCacheLayer
from tgis.engines.padded.seq2seq_lm import Seq2SeqLM
from tgis.errors import OutOfMemory, StartError


@pytest.fixture(scope="module", params=["glassllm", "detransliterator"])
def engine(request: pytest.FixtureRequest) -> PaddedEngine:
    options = engine_options(request.getfixturevalue(f"{request.param}_dir"), 8, threads=1)
    loaded = PaddedEngine(options)
    loaded.warm_up()
    return loaded


@pytest.fixture(scope="module")
def alone(engine: PaddedEngine) -> Outcome:
    return {n: outcome for request in requests() for n, outcome in run(engine, [request]).items()}


def network_of(engine: PaddedEngine) -> torch.nn.Module:
    assert isinstance(engine._model, CausalLM | Seq2SeqLM)
    return engine._model.model


LACK, BUG = torch.OutOfMemoryError("none left"), RuntimeError("broken")


@pytest.mark.parametrize(("error", "calls"), [(LACK, {1}), (LACK, {3, 4, 8}), (BUG, {2}), (BUG, {6, 14, 15})])
def test_a_pass_that_fails_changes_nobodys_result(
    engine: PaddedEngine, alone: Outcome, monkeypatch: pytest.MonkeyPatch, error: Exception, calls: set[int]
) -> None:
    network = network_of(engine)
    monkeypatch.setattr(network, "forward", Failing(network.forward, error, calls))
    check(run(engine, requests()), alone)
    assert engine._seqs == []


@pytest.mark.parametrize("call", [1, 3, 8])
def test_a_cache_that_cannot_grow_changes_nobodys_result(
    engine: PaddedEngine, alone: Outcome, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    moved = Failing(PaddedCacheLayer._reallocated, torch.OutOfMemoryError("none left"), {call})
    monkeypatch.setattr(PaddedCacheLayer, "_reallocated", lambda self, *args: moved(self, *args))  # noqa: PLW0108 - to bind
    check(run(engine, requests()), alone)
    assert moved.count >= call


def test_a_lost_device_is_fatal(engine: PaddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(engine)
    monkeypatch.setattr(network, "forward", Failing(network.forward, torch.AcceleratorError("device-side assert"), {1}))
    row = Sequence(requests()[0], 0.0)
    with pytest.raises(StartError, match="device is lost"):
        engine.step(StepPlan.compute_all([row]))
    engine.release([row])


def test_rows_that_were_lost_are_asked_for_again(engine: PaddedEngine) -> None:
    row = Sequence(requests()[0], 0.0)
    row.num_computed_tokens, row.tokens = len(row.tokens), [*row.tokens, 7]
    with pytest.raises(OutOfMemory, match="lost"):
        engine.step(StepPlan.compute_all([row]))
