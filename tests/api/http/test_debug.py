"""/debug/batch: its content, and what a server shows of its queue."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from batches import EOS, limits
from harness import as_stream_request, run_async, unary_request, wait_until
from http_port import NO_AUTH, serving
from local_server import local_server
from repository import REPOSITORY

from tgis.api.http.debug import debug_route
from tgis.batcher.batcher import Batcher
from tgis.errors import Unavailable
from tgis.ipc.messages import BatchState, RequestState, WaitReason

SECRET = "password"
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
@run_async
async def test_it_is_json_and_browsers_load_it_again(state: BatchState | None) -> None:
    async def inspect() -> BatchState:
        if state is None:
            raise Unavailable("it is gone")
        return state

    async with (
        serving([debug_route(NO_AUTH, inspect)]) as port,
        aiohttp.ClientSession() as client,
        client.get(f"http://127.0.0.1:{port}/debug/batch") as answer,
    ):
        body, headers = await answer.read(), answer.headers
    assert (answer.content_type, headers["Cache-Control"], headers["Refresh"]) == ("application/json", "no-store", "2")
    if state is None:
        assert (answer.status, json.loads(body)) == (503, {"error": "it is gone"})
    else:
        assert (answer.status, msgspec.json.decode(body, type=BatchState)) == (200, state)


def test_a_server_shows_its_queue_and_running_requests(tmp_path: Path) -> None:
    options = {"DEBUG_BATCH": True, "MAX_BATCH_SIZE": 2}
    with local_server(tmp_path, {"step_seconds": 0.01, "padded": True}, **options) as server, server.stub() as stub:

        def view() -> dict[str, Any]:
            state: dict[str, Any] = json.loads(server.get("/debug/batch")[1])
            return state

        calls = [stub.GenerateStream(as_stream_request(unary_request(SECRET, 900 + n))) for n in range(105)]
        wait_until(lambda: view()["num_waiting"] == 103, "queue")
        seen = view()
        for call in calls:
            call.cancel()
        wait_until(lambda: (view()["num_running"], view()["num_waiting"], view()["context_tokens"]) == (0, 0, 0), "end")
    assert (seen["num_running"], seen["max_batch_size"]) == (2, 2)
    assert seen["wait_reason"] == "the batch is at its maximum size"
    running, waiting = seen["running_requests"], seen["waiting_requests"]
    assert [len(running), len(waiting)] == [2, 100]  # of all
    assert all(row["prompt_tokens"] == len(SECRET) and row["generated_tokens"] > 0 for row in running)
    assert waiting == sorted(waiting, key=lambda row: row["id"])
    assert SECRET not in json.dumps(seen)
