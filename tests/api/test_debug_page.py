"""/debug/batch: its content as HTML and JSON, and its behaviour with a hung engine."""

import asyncio
import html
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgspec
import pytest
from batches import EOS, limits
from browser import needs_chromium, open_page, running_chromium
from harness import Server, as_stream_request, run_async, running_fake, unary_request
from http_port import NO_AUTH, no_metrics, serving

from tgis.api.http.pages.batch import render_json, render_page
from tgis.api.http.probes import Probes
from tgis.batcher.batcher import Batcher
from tgis.config import Config
from tgis.errors import Unavailable
from tgis.ipc.messages import BatchState, RequestState, WaitReason
from tgis.utils.options import declared_options

ROW = RequestState(
    id=7, seconds_since_arrival=12.25, prompt_tokens=1500, computed_tokens=1504, generated_tokens=5, remaining_tokens=95
)
EMPTY = Batcher(limits(), {EOS}).state(0.0, max_seqs=0)
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


def text_of(page: str) -> str:
    """What a person reads."""
    page = page.replace("<wbr>", "")
    return html.unescape(re.sub(r"\s*(<style>.*?</style>|<[^>]*>)+", " ", page, flags=re.DOTALL))


def test_the_page_says_what_json_says() -> None:
    page = text_of(render_page(BUSY).text)
    assert "1,200 running, 34,567 waiting" in page
    assert "wait_reason the batch would not fit into memory" in page
    assert "MAX_NEW_TOKENS" in page
    assert "token_capacity 4,100 initial_token_capacity 5,200" in page
    assert "remaining_tokens 9 12.25 1,500 1,504 0 2,500 and 34,566 more" in page
    assert "remaining_tokens 7 12.25 1,500 1,504 5 95 8 12.25 1,500 20 0 95 and 1,198 more" in page
    values = json.loads(render_json(BUSY))
    assert all(name in page for name in values.keys() - {"running_requests", "waiting_requests"})


@pytest.mark.parametrize("reason", WaitReason)
def test_advice_for_every_reason_names_options_that_exist(reason: WaitReason) -> None:
    state = msgspec.structs.replace(BUSY, wait_reason=reason)
    advice = json.loads(render_json(state))["advice"]
    assert advice in text_of(render_page(state).text)
    options = {name.upper() for row in declared_options(Config) for name in row.names}
    assert set(re.findall(r"[A-Z]+_[A-Z_]+|DTYPE", advice)) <= options


def test_json_is_the_state_with_advice() -> None:
    said = json.loads(render_json(BUSY))
    assert "MAX_NEW_TOKENS" in said.pop("advice")
    assert msgspec.convert(said, BatchState) == BUSY
    assert said["wait_reason"] == "the batch would not fit into memory"
    assert json.loads(render_json(EMPTY))["advice"] is None


def view(port: int, accept: str = "*/*") -> tuple[int, Any, str]:
    """Status, headers and body."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/debug/batch", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except HTTPError as error:
        return error.code, error.headers, error.read().decode()


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@run_async
async def test_browsers_get_html_and_others_json() -> None:
    async def inspect() -> BatchState:
        if news is None:
            raise Unavailable("it is gone")
        return news

    async with serving(Probes(lambda: None, no_metrics, NO_AUTH, inspect).debug_routes()) as port:
        for news, status in ((BUSY, 200), (None, 503)):
            for accept in (BROWSER, "*/*", ""):
                kind = "text/html" if news and accept == BROWSER else "application/json"
                code, headers, body = await asyncio.to_thread(view, port, accept)
                assert (code, headers["Content-Type"]) == (status, f"{kind}; charset=utf-8")
                assert (headers["Cache-Control"], headers["Refresh"]) == ("no-store", "2")
                policy = headers["Content-Security-Policy"]
                assert policy is None if kind == "application/json" else policy.startswith("default-src 'none'; ")
                assert ("34" in body, "it is gone" in body) == (news is not None, news is None)


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
        page = view(server.http_port, BROWSER)[2]
        for stream in calls:
            stream.cancel()
    assert (seen["num_running"], seen["max_batch_size"]) == (2, 2)
    assert seen["wait_reason"] == "the batch is at its maximum size"
    assert "MAX_BATCH_SIZE" in seen["advice"]
    assert [len(seen["running_requests"]), len(seen["waiting_requests"])] == [2, 100]  # of all
    assert all(row["prompt_tokens"] == len(SECRET) and row["generated_tokens"] > 0 for row in seen["running_requests"])
    assert seen["waiting_requests"] == sorted(seen["waiting_requests"], key=lambda row: row["id"])
    assert "and 53 more" in text_of(page)
    assert page.count("<tr><td>") < 2 + 50 + 40  # rows: running, waiting, fields
    assert SECRET not in page + json.dumps(seen)
    assert until(server, lambda seen: not seen["num_running"] and not seen["num_waiting"])["context_tokens"] == 0


@needs_chromium
@run_async
async def test_nothing_is_cut_on_a_phone(tmp_path: Path) -> None:
    row = RequestState(
        id=123456, seconds_since_arrival=1234.567, prompt_tokens=131072, computed_tokens=131072,
        generated_tokens=131072, remaining_tokens=131072,
    )  # fmt: skip

    async def inspect() -> BatchState:
        return msgspec.structs.replace(BUSY, running_requests=[row] * 100, waiting_requests=[row])

    with running_chromium(tmp_path) as chromium:
        async with (
            serving(Probes(lambda: None, no_metrics, NO_AUTH, inspect).debug_routes()) as port,
            open_page(chromium, f"http://localhost:{port}/debug/batch", 390, 844, phone=True) as page,
        ):
            await page.until("document.querySelectorAll('table').length === 3")
            cut = "e => e.scrollWidth > e.clientWidth"
            assert (
                await page.value(
                    f"[document.documentElement, ...document.querySelectorAll('.wide')].filter({cut}).length"
                )
                == 0
            )
            assert await page.value("[...document.querySelectorAll('table')].at(-1).rows.length") == 1 + 50


@run_async
async def test_without_its_option_it_says_so() -> None:
    async with serving(Probes(lambda: None, no_metrics, NO_AUTH).routes()) as port:
        code, _, body = await asyncio.to_thread(view, port)
        assert (code, json.loads(body)["error"]) == (404, "/debug/batch is off, DEBUG_BATCH=true turns it on")


def test_a_hung_engine_is_503_without_delay(server: Server) -> None:
    os.kill(server.engine_pid(), signal.SIGSTOP)
    try:
        assert "or it hangs" in until(server, lambda seen: "error" in seen)["error"]
    finally:
        os.kill(server.engine_pid(), signal.SIGCONT)
    until(server, lambda seen: seen.get("num_running") == 0)
