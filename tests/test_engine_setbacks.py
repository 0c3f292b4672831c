"""The real engine when steps fail: what survives is what each request gives alone."""

from typing import Any

import pytest
import torch
from batches import engine_options

from tgis.batcher.batcher import Batcher
from tgis.batcher.sequence import Plan, Sequence
from tgis.batcher.weights import Limits, MemoryModel
from tgis.engines.causal import CausalModel
from tgis.engines.hf_transformers import PaddedEngine
from tgis.engines.kv_cache import PaddedLayer
from tgis.engines.seq2seq import Seq2SeqModel
from tgis.errors import OutOfMemory, StartError
from tgis.messages import Details, Request, Sampling, TokenFacts

Outcome = dict[int, tuple[list[int], list[TokenFacts]]]  # id -> generated tokens, facts of its input


@pytest.fixture(scope="module", params=["glassllm", "detransliterator"])
def engine(request: pytest.FixtureRequest) -> PaddedEngine:
    options = engine_options(request.getfixturevalue(f"{request.param}_dir"), 8, threads=1)
    loaded = PaddedEngine(options)
    loaded.warm_up()
    return loaded


def requests() -> list[Request]:
    kinds = [Sampling(), Sampling(temperature=1.0, seed=5, top_k=9), Sampling(repetition_penalty=1.3)]
    return [
        Request(
            n,
            [1, *range(40 + n, 44 + 5 * n)],
            8 + 2 * n,
            capped=False,
            sampling=kinds[n % 3],
            details=Details(inputs=n % 2 == 0, logprobs=True),
        )
        for n in range(5)
    ]


def run(engine: PaddedEngine, wanted: list[Request]) -> Outcome:
    """As the worker does, without the messages."""
    limits = Limits(8, MemoryModel.of_tokens(10**6), prefill_tokens=100, max_padding=0.9, padded=True)
    batcher = Batcher(limits, {2})
    batcher.submit(wanted, 0.0)
    outcome: Outcome = {}
    inputs: dict[int, list[TokenFacts]] = {}
    refused: list[Sequence] = []
    now = 0.0
    while plan := batcher.plan(now := now + 1.0):
        try:
            result = engine.step(plan)
        except (OutOfMemory, RuntimeError) as error:
            engine.release(plan.rows)
            refused += batcher.retreat(plan, out_of_memory=isinstance(error, OutOfMemory))
            continue
        assert not inputs.keys() & result.inputs.keys()
        inputs |= result.inputs
        ended = batcher.commit(plan, result.tokens, now)
        engine.release(ended)
        outcome |= {row.id: (row.tokens[row.prompt_length :], inputs.get(row.id, [])) for row in ended}
    assert refused == []
    return outcome


@pytest.fixture(scope="module")
def alone(engine: PaddedEngine) -> Outcome:
    return {n: outcome for request in requests() for n, outcome in run(engine, [request]).items()}


def check(found: Outcome, expected: Outcome) -> None:
    assert found.keys() == expected.keys()
    for n, (tokens, facts) in expected.items():
        assert found[n][0] == tokens
        logprobs = [[fact.logprob for fact in some] for some in (found[n][1], facts)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4, nan_ok=True)


class Failing:
    """A function that raises instead, at some of its calls."""

    def __init__(self, function: Any, error: Exception, calls: set[int]) -> None:
        self.function, self.error, self.calls = function, error, calls
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count in self.calls:
            raise self.error
        return self.function(*args, **kwargs)


def network_of(engine: PaddedEngine) -> torch.nn.Module:
    assert isinstance(engine._model, CausalModel | Seq2SeqModel)
    return engine._model.network


LACK, BUG = torch.OutOfMemoryError("none left"), RuntimeError("broken")


@pytest.mark.parametrize(("error", "calls"), [(LACK, {1}), (LACK, {3, 4, 8}), (BUG, {2}), (BUG, {6, 14, 15})])
def test_a_pass_that_fails_changes_nobodys_result(
    engine: PaddedEngine, alone: Outcome, monkeypatch: pytest.MonkeyPatch, error: Exception, calls: set[int]
) -> None:
    network = network_of(engine)
    monkeypatch.setattr(network, "forward", Failing(network.forward, error, calls))
    check(run(engine, requests()), alone)
    assert engine._rows == []


@pytest.mark.parametrize("call", [1, 3, 8])
def test_a_cache_that_cannot_grow_changes_nobodys_result(
    engine: PaddedEngine, alone: Outcome, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    moved = Failing(PaddedLayer._moved, torch.OutOfMemoryError("none left"), {call})
    monkeypatch.setattr(PaddedLayer, "_moved", lambda self, *args: moved(self, *args))  # noqa: PLW0108 - to bind
    check(run(engine, requests()), alone)
    assert moved.count >= call


def test_a_lost_device_is_fatal(engine: PaddedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(engine)
    monkeypatch.setattr(network, "forward", Failing(network.forward, torch.AcceleratorError("device-side assert"), {1}))
    row = Sequence(requests()[0], 0.0)
    with pytest.raises(StartError, match="device is lost"):
        engine.step(Plan.whole([row]))
    engine.release([row])


def test_rows_that_were_lost_are_asked_for_again(engine: PaddedEngine) -> None:
    row = Sequence(requests()[0], 0.0)
    row.computed, row.tokens = len(row.tokens), [*row.tokens, 7]
    with pytest.raises(OutOfMemory, match="lost"):
        engine.step(Plan.whole([row]))
