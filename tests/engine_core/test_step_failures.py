"""Failed steps of a real engine: every request still gives what it gives alone."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from batches import engine_options
from step_failures import Failing, Outcomes, check, requests, run

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.padded.causal_lm import CausalLM
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.padded.kv_cache import PaddedCacheLayer
from tgis.engines.padded.model import MAX_PREFILL_TOKENS
from tgis.engines.padded.seq2seq_lm import Seq2SeqLM
from tgis.errors import OutOfMemory, StartError


@pytest.fixture(scope="module", params=["glassllm", "detransliterator"])
def engine(request: pytest.FixtureRequest) -> Iterator[PaddedEngine]:
    """It computes inputs, and outputs again, in chunks shorter than them."""
    with mock.patch.dict(MAX_PREFILL_TOKENS, {"cpu": 16}):
        loaded = PaddedEngine(engine_options(request.getfixturevalue(f"{request.param}_dir"), 8))
        loaded.warm_up()
        yield loaded


@pytest.fixture(scope="module")
def alone(engine: PaddedEngine) -> Outcomes:
    return {n: outcome for request in requests() for n, outcome in run(engine, [request]).items()}


def network_of(engine: PaddedEngine) -> torch.nn.Module:
    assert isinstance(engine._model, CausalLM | Seq2SeqLM)
    return engine._model.model


NO_MEMORY, BUG = torch.OutOfMemoryError("none left"), RuntimeError("broken")


@pytest.mark.parametrize(("error", "calls"), [(NO_MEMORY, {1}), (NO_MEMORY, {3, 4, 8}), (BUG, {6, 14, 15})])
def test_a_failed_step_changes_no_result(
    engine: PaddedEngine, alone: Outcomes, monkeypatch: pytest.MonkeyPatch, error: Exception, calls: set[int]
) -> None:
    network = network_of(engine)
    monkeypatch.setattr(network, "forward", Failing(network.forward, error, calls))
    check(run(engine, requests()), alone)
    assert engine._seqs == []


@pytest.mark.parametrize("call", [1, 8])
def test_a_cache_that_cannot_grow_changes_no_result(
    engine: PaddedEngine, alone: Outcomes, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    allocate = Failing(PaddedCacheLayer._allocate, torch.OutOfMemoryError("none left"), {call})
    monkeypatch.setattr(PaddedCacheLayer, "_allocate", lambda self, *args: allocate(self, *args))  # noqa: PLW0108 - to bind
    check(run(engine, requests()), alone)
    assert allocate.count >= call


def test_a_lost_device_is_fatal(engine: PaddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(engine)
    monkeypatch.setattr(network, "forward", Failing(network.forward, torch.AcceleratorError("device-side assert"), {1}))
    seq = Sequence(requests()[0], 0.0)
    with pytest.raises(StartError, match=r"^the device is lost: device-side assert$"):
        engine.step(StepPlan.compute_all([seq]))
    engine.release([seq])


def test_lost_sequences_are_recomputed(engine: PaddedEngine) -> None:
    seq = Sequence(requests()[0], 0.0)
    seq.num_computed_tokens, seq.tokens = len(seq.tokens), [*seq.tokens, 7]
    with pytest.raises(OutOfMemory, match=r"^the rows were lost when the cache could not grow$"):
        engine.step(StepPlan.compute_all([seq]))
