"""/docs and /ui without a browser: when they are there, and what their policy lets a browser do."""

import base64
import hashlib
import re
from typing import Any

import aiohttp
import pytest
from harness import run_async
from http_port import no_metrics, serving, serving_while_loading

from tgis.api.http.pages.routes import page_routes
from tgis.api.http.probes import Probes


def sources(policy: str) -> dict[str, list[str]]:
    """What a Content-Security-Policy allows."""
    return {name: values for name, *values in map(str.split, policy.split(";"))}


def source_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("path", ["/docs", "/ui"])
@run_async
async def test_a_page_is_there_while_the_model_loads_and_may_use_nothing_from_elsewhere(path: str) -> None:
    async with serving_while_loading() as url, aiohttp.ClientSession() as client, client.get(url + path) as answer:
        text, headers = await answer.text(), answer.headers
        assert (answer.status, answer.content_type) == (200, "text/html")
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    allowed = sources(headers["Content-Security-Policy"])
    closed = {name: ["'none'"] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")}
    scripted = {"script-src": [*map(source_of, scripts)], "connect-src": ["'self'"]} if path == "/ui" else {}
    assert allowed == closed | {"style-src": [*map(source_of, styles)]} | scripted
    assert len(scripts) == (path == "/ui")
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|<link|<img|\ssrc=|\sstyle=|\son\w+=", markup)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", "".join(scripts))
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "accept", "found"),
    [
        ("/", "text/html,*/*;q=0.8", (307, "ui")),
        ("/", "*/*", (200, None)),
        ("/health", "text/html", (200, None)),
        ("/ui/", "text/html", (308, "../ui")),
    ],
)
@run_async
async def test_a_browser_is_sent_to_the_page_where_there_is_one(path: str, accept: str, found: tuple[int, Any]) -> None:
    probes, ui = Probes(lambda: None, no_metrics).routes(), page_routes([], "m", needs_token=False)
    for routes, expected in ((probes, (404 if "ui" in path else 200, None)), ([*probes, *ui], found)):
        async with (
            serving(routes) as port,
            aiohttp.ClientSession(f"http://localhost:{port}", headers={"Accept": accept}) as client,
            client.get(path, allow_redirects=False) as answer,
        ):
            assert (answer.status, answer.headers.get("Location")) == expected
