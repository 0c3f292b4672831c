"""/docs and /ui without a browser: their policy, and what the OpenAPI document describes."""

import base64
import functools
import hashlib
import json
import re
import shutil
import subprocess
from typing import Any

import aiohttp
import pytest
import yaml
from harness import run_async
from http_port import no_metrics, serving, serving_while_loading
from repository import REPOSITORY
from tables import table

from tgis import __version__
from tgis.api.http.openapi import make_document
from tgis.api.http.pages.routes import _DIRECTORY as DIRECTORY
from tgis.api.http.pages.routes import page_routes
from tgis.api.http.probes import Probes


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
    allowed = {name: values for name, *values in map(str.split, headers["Content-Security-Policy"].split(";"))}
    closed = {name: ["'none'"] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")}
    scripted = {"script-src": [*map(source_of, scripts)], "connect-src": ["'self'"]} if path == "/ui" else {}
    assert allowed == closed | {"style-src": [*map(source_of, styles)]} | scripted
    assert len(scripts) == (path == "/ui")
    assert all(file.read_text() in "".join(scripts) for file in DIRECTORY.glob(f"{path[1:]}/*.js"))
    assert "<main" in text.partition("</head>")[2]
    assert all("font" in style and "<" not in style for style in styles)
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|<link|<img|\ssrc=|\sstyle=|\son\w+=", markup)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", "".join(scripts))
    others = [headers[name] for name in ("Cache-Control", "X-Content-Type-Options", "Referrer-Policy")]
    assert others == ["no-store", "nosniff", "no-referrer"]


@table("errors", "redirections")
@run_async
async def test_a_browser_is_sent_to_the_page(row: dict[str, Any]) -> None:
    pages = page_routes([], "m", needs_token=False) if row.get("pages", True) else []
    routes = [*Probes(lambda: None, no_metrics).routes(), *pages]
    async with (
        serving(routes) as port,
        aiohttp.ClientSession(f"http://localhost:{port}", headers={"Accept": row["accept"]}) as client,
        client.get(row["path"], allow_redirects=False) as answer,
    ):
        assert (answer.status, answer.headers.get("Location")) == (row["status"], row["location"])


def in_any_order(part: dict[str, Any]) -> dict[str, Any]:
    """Alternatives in an order that does not depend on msgspec's version."""
    ordered = sorted(part.get("anyOf", ()), key=functools.partial(json.dumps, sort_keys=True))
    return part | ({"anyOf": ordered} if ordered else {})


@run_async
async def test_the_document_describes_every_route() -> None:
    async with serving_while_loading() as url, aiohttp.ClientSession(url) as client:
        async with client.get("/openapi.json") as answer, client.get("/api-doc/openapi.json") as same:
            document = json.loads(text := await answer.text(), object_hook=in_any_order)
            assert await same.text() == text
        async with client.get("/docs") as answer:
            page = await answer.text()
    assert document["info"].pop("version") == __version__
    # A change of the API changes this file, from which clients may be generated.
    golden = (REPOSITORY / "tests/golden/openapi.json").read_text()
    assert document == json.loads(golden, object_hook=in_any_order)
    described = [(*of, path) for path, methods in document["paths"].items() for of in methods.items()]
    for method, operation, path in described:
        assert f"<td><code>{method.upper()} {path}</code><td>{operation['summary']}<" in page
    assert f"<title>tgis {__version__}, serving m</title>" in page
    route = yaml.safe_load((REPOSITORY / "deployment/components/http-route/http-route.yaml").read_text())
    routed = {match["path"]["value"] for rule in route["spec"]["rules"] for match in rule["matches"]}
    assert {path for path in document["paths"] if not path.startswith("/v1/")} <= routed
    secured = make_document([], needs_token=True)
    scheme = {"token": {"type": "http", "scheme": "bearer"}}
    assert (secured["security"], secured["components"]["securitySchemes"]) == ([{"token": []}], scheme)


ELEMENT = "globalThis.element = (tagName) => ({ tagName, childNodes: [], append() {} });"
RENDER = "blocks(require('fs').readFileSync(0, 'utf8').split('\\n'), 0);"
BLANKS = " " * 200_000


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize("line", [f"# {BLANKS}\u2028", f"- {BLANKS}\u2028", " " * 990 + "-" + " " * 990 + "x"])
def test_no_output_keeps_a_browser_busy(line: str) -> None:
    """It does for minutes if a pattern tries every way to share the blanks."""
    script = (DIRECTORY / "ui/markdown.js").read_text()
    text = f"a | b\n{line}\n\n" * 100
    subprocess.run(["node", "-e", ELEMENT + script + RENDER], input=text.encode(), check=True, timeout=50)
