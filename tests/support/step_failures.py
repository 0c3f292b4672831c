"""Runs requests on an engine whose calls fail, and compares what they get with what they should."""

from typing import Any

import pytest

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.engines.base import Engine
from tgis.errors import OutOfMemory
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, TokenLogprobs

Outcome = dict[int, tuple[list[int], list[TokenLogprobs]]]  # id -> generated tokens, logprobs of its input


def requests() -> list[Request]:
    kinds = [SamplingParams(), SamplingParams(temperature=1.0, seed=5, top_k=9), SamplingParams(repetition_penalty=1.3)]
    return [
        Request(
            n,
            [1, *range(40 + n, 44 + 5 * n)],
            8 + 2 * n,
            limited_by_context=False,
            sampling_params=kinds[n % 3],
            logprob_options=LogprobOptions(input_tokens=n % 2 == 0, logprobs=True),
        )
        for n in range(5)
    ]


PADDED = BatchLimits(8, 10**6, prefill_tokens=100, max_prefill_padding=0.9, padded=True)


def run(engine: Engine, wanted: list[Request], limits: BatchLimits = PADDED) -> Outcome:
    """As the engine core does, without the messages."""
    batcher = Batcher(limits, {2})
    batcher.submit(wanted, 0.0)
    outcome: Outcome = {}
    inputs: dict[int, list[TokenLogprobs]] = {}
    failed = []
    now = 0.0
    while not batcher.idle:
        plan = batcher.plan(now := now + 1.0)
        engine.release(plan.to_release)
        if not plan.seqs:
            break
        try:
            result = engine.step(plan)
        except (OutOfMemory, RuntimeError, IndexError) as error:
            failed += batcher.rollback(plan, out_of_memory=isinstance(error, OutOfMemory))
            continue
        assert not inputs.keys() & result.prompt_logprobs.keys()
        inputs |= result.prompt_logprobs
        ended = batcher.commit(plan, result.tokens, now)
        outcome |= {seq.id: (seq.tokens[seq.prompt_length :], inputs.get(seq.id, [])) for seq in ended}
    assert failed == []
    return outcome


def check(found: Outcome, expected: Outcome) -> None:
    assert found.keys() == expected.keys()
    for n, (tokens, facts) in expected.items():
        assert found[n][0] == tokens
        logprobs = [[fact.logprob for fact in some] for some in (found[n][1], facts)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4, nan_ok=True)


class Failing:
    """A function that raises at some of its calls."""

    def __init__(self, function: Any, error: Exception, calls: set[int]) -> None:
        self.function, self.error, self.calls = function, error, calls
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count in self.calls:
            raise self.error
        return self.function(*args, **kwargs)
