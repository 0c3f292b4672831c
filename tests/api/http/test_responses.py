"""tgis.api.http.responses: the order of several outputs, and the headers with the time they took."""

import math
from types import SimpleNamespace

import pytest

from tgis.api.http import responses
from tgis.api.http.responses import best_first, timing_headers
from tgis.frontend.engine_output import RequestTimings
from tgis.frontend.output import RequestOutput, TokenInfo


def test_the_best_has_the_highest_mean_logprob() -> None:
    def output(index: int, *logprobs: float) -> RequestOutput:
        return RequestOutput(index, tokens=[TokenInfo(5, "a", logprob, 0, []) for logprob in logprobs])

    made = [output(0, -4.0), output(1, math.nan), output(2, -1.0, -2.0), output(3, -1.5), output(4), output(5, -3.0)]
    assert [one.index for one in best_first(made)] == [2, 3, 5, 0, 1, 4]


def test_times_are_sums_over_the_outputs_but_for_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "time", SimpleNamespace(monotonic=lambda: 20.0))
    scheduled = RequestTimings(arrived=10.0, submitted=10.25, scheduled=11.25)
    never_scheduled = RequestTimings(arrived=10.0, submitted=10.25)
    outputs = [
        RequestOutput(generated_token_count=7, timings=scheduled),
        RequestOutput(generated_token_count=0, timings=never_scheduled),
    ]
    assert timing_headers(outputs, 5) == {
        "x-compute-time": "10.000000000",
        "x-validation-time": "500",
        "x-queue-time": "10750",
        "x-inference-time": "8750",
        "x-total-time": "20000",
        "x-time-per-token": "1250",
        "x-prompt-tokens": "5",
        "x-generated-tokens": "7",
    }
