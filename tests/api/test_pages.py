"""/docs and /ui without a browser: who gets them, when, and what their policy lets a browser do."""

import base64
import hashlib
import re

import aiohttp
import pytest
from harness import run_async
from http_port import serving_while_loading

from tgis.api.http.pages.page import make_page

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


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


@pytest.mark.parametrize("path", ["/docs", "/ui", "/openapi.json"])
@run_async
async def test_a_page_needs_the_token(path: str) -> None:
    async with serving_while_loading(api_key="key") as url, aiohttp.ClientSession() as client:
        async with client.get(url + path, headers=BROWSER) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert await answer.json() == {"error": "a valid bearer token is required", "error_type": "unauthorized"}
        async with client.get(url + path, headers=BROWSER | {"Authorization": "Bearer key"}) as answer:
            assert answer.status == 200


def test_titles_are_escaped() -> None:
    assert "<title>&lt;b&gt; &amp;</title>" in make_page("<b> &", "").text
