"""/debug/batch: its content."""

import json

import aiohttp
import msgspec
import pytest
from batches import EOS, limits
from harness import run_async
from http_port import NO_AUTH, serving
from repository import REPOSITORY

from tgis.api.http.debug import debug_route
from tgis.batcher.batcher import Batcher
from tgis.errors import Unavailable
from tgis.ipc.messages import BatchState, RequestState, WaitReason

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
