"""Runs requests on an engine whose calls fail, and compares what they get with what they should."""

from typing import Any

import pytest
from tiny_models import Outcome, outcomes

from tgis.batcher.capacity import BatchLimits
from tgis.engines.base import Engine
from tgis.errors import OutOfMemory
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

Outcomes = dict[int, Outcome]


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


def run(engine: Engine, wanted: list[Request], limits: BatchLimits = PADDED) -> Outcomes:
    """What requests that come together get, although steps fail."""
    return outcomes(engine, limits, wanted, None, failures=(OutOfMemory, RuntimeError, IndexError))[0]


def check(found: Outcomes, expected: Outcomes) -> None:
    """The same tokens, and the same logprobs but for rounding."""
    assert found.keys() == expected.keys()
    for n, one in expected.items():
        assert found[n].tokens == one.tokens
        logprobs = [[fact.logprob for fact in (*some.inputs, *some.facts)] for some in (found[n], one)]
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
