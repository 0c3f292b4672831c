"""tgis.api.http: the order of several outputs, the headers with the time they took, and /debug/batch."""

import json
import math
from types import SimpleNamespace

import aiohttp
import msgspec
import pytest
from batches import EOS, limits
from harness import run_async
from http_port import serving
from repository import REPOSITORY

from tgis.api.http import responses
from tgis.api.http.auth import HttpAuth
from tgis.api.http.debug import debug_route
from tgis.api.http.responses import best_first, timing_headers
from tgis.batcher.batcher import Batcher
from tgis.errors import Unavailable
from tgis.frontend.engine_output import RequestTimings
from tgis.frontend.output import RequestOutput, TokenInfo
from tgis.ipc.messages import BatchState, RequestState, WaitReason


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


ROW = RequestState(
    id=7, seconds_since_arrival=12.25, prompt_tokens=1500, computed_tokens=1504, generated_tokens=5, remaining_tokens=95
)
BUSY = msgspec.structs.replace(
    Batcher(limits(), {EOS}).state(0.0, max_seqs=0), wait_reason=WaitReason.MEMORY, running_requests=[ROW]
)


def test_the_docs_explain_every_reason() -> None:
    text = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert all(f"\n| {reason.value} | " in text for reason in WaitReason)


@pytest.mark.parametrize("state", [BUSY, None])
@pytest.mark.parametrize("api_key", ["key", None])
@run_async
async def test_it_is_json_and_browsers_load_it_again(state: BatchState | None, api_key: str | None) -> None:
    async def inspect() -> BatchState:
        if state is None:
            raise Unavailable("it is gone")
        return state

    async with (
        serving([debug_route(HttpAuth(None, api_key, lambda: None), inspect)]) as port,
        aiohttp.ClientSession() as client,
        client.get(f"http://127.0.0.1:{port}/debug/batch") as answer,
    ):
        body, headers = await answer.read(), answer.headers
    assert (answer.content_type, headers["Cache-Control"], headers["Refresh"]) == ("application/json", "no-store", "2")
    if api_key:
        assert (answer.status, json.loads(body)) == (401, {"error": "a valid bearer token is required"})
    elif state is None:
        assert (answer.status, json.loads(body)) == (503, {"error": "it is gone"})
    else:
        assert (answer.status, msgspec.json.decode(body, type=BatchState)) == (200, state)
        assert body == msgspec.json.format(body, indent=2) + b"\n"
