"""/debug/batch: its content, and its behaviour with a hung engine."""

import asyncio
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgspec
import pytest
from harness import Server, as_stream_request, run_async, running_fake, unary_request
from http_port import NO_AUTH, serving

from tgis.api.http.debug import debug_route
from tgis.errors import Unavailable
from tgis.ipc.messages import BatchState, RequestState, WaitReason

REPOSITORY = Path(__file__).parents[2]
ROW = RequestState(
    id=7, seconds_since_arrival=12.25, prompt_tokens=1500, computed_tokens=1504, generated_tokens=5, remaining_tokens=95
)
BUSY = BatchState(
    num_running=1200,
    num_waiting=34567,
    wait_reason=WaitReason.MEMORY,
    last_wait_reason=WaitReason.MEMORY,
    seconds_since_last_wait=0.5,
    total_generated_tokens=123456,
    context_tokens=3000,
    peak_context_tokens=4000,
    token_capacity=4100,
    initial_token_capacity=5200,
    max_prefill_tokens=512,
    initial_max_prefill_tokens=512,
    max_batch_size=2000,
    max_prefill_padding=0.2,
    max_waiting_tokens=24,
    padded=True,
    chunked_prefill=False,
    running_requests=[ROW, msgspec.structs.replace(ROW, id=8, computed_tokens=20, generated_tokens=0)],
    waiting_requests=[msgspec.structs.replace(ROW, id=9, generated_tokens=0, remaining_tokens=2500)],
)


def test_the_docs_explain_every_reason() -> None:
    text = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert all(f"\n| {reason.value} | " in text for reason in WaitReason)


def view(port: int) -> tuple[int, Any, str]:
    """Status, headers and body."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/debug/batch", timeout=30) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.mark.parametrize("state", [BUSY, None])
@run_async
async def test_it_is_json_and_browsers_load_it_again(state: BatchState | None) -> None:
    async def inspect() -> BatchState:
        if state is None:
            raise Unavailable("it is gone")
        return state

    async with serving([debug_route(NO_AUTH, inspect)]) as port:
        code, headers, body = await asyncio.to_thread(view, port)
    assert headers.get_content_type() == "application/json"
    assert (headers["Cache-Control"], headers["Refresh"]) == ("no-store", "2")
    if state is None:
        assert (code, json.loads(body)) == (503, {"error": "it is gone"})
    else:
        assert (code, msgspec.json.decode(body, type=BatchState)) == (200, state)


SECRET = "password"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    steps = {"step_seconds": 0.01, "padded": True}
    with running_fake(tmp_path_factory.mktemp("debug"), steps, DEBUG_BATCH=True, MAX_BATCH_SIZE=2) as running:
        yield running


def until(server: Server, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll the view until `good` holds."""
    limit = time.monotonic() + 20
    seen: dict[str, Any] = {}
    while not (seen and good(seen)):
        assert time.monotonic() < limit, seen
        seen = json.loads(view(server.http_port)[2])
    return seen


def test_a_server_shows_its_queue_and_running_requests(server: Server) -> None:
    with server.stub() as stub:
        calls = [stub.GenerateStream(as_stream_request(unary_request(SECRET, 900 + n))) for n in range(105)]
        seen = until(server, lambda seen: seen["num_waiting"] == 103)
        for stream in calls:
            stream.cancel()
    assert (seen["num_running"], seen["max_batch_size"]) == (2, 2)
    assert seen["wait_reason"] == "the batch is at its maximum size"
    assert [len(seen["running_requests"]), len(seen["waiting_requests"])] == [2, 100]  # of all
    assert all(row["prompt_tokens"] == len(SECRET) and row["generated_tokens"] > 0 for row in seen["running_requests"])
    assert seen["waiting_requests"] == sorted(seen["waiting_requests"], key=lambda row: row["id"])
    assert SECRET not in json.dumps(seen)
    assert until(server, lambda seen: not seen["num_running"] and not seen["num_waiting"])["context_tokens"] == 0


def test_a_hung_engine_is_503_without_delay(server: Server) -> None:
    os.kill(server.engine_pid(), signal.SIGSTOP)
    try:
        assert "or it hangs" in until(server, lambda seen: "error" in seen)["error"]
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)
    until(server, lambda seen: seen.get("num_running") == 0)
