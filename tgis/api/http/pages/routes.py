"""`/ui`, `/docs` and the OpenAPI document: without a token, while the model is loading, too.

`/ui` is a page to try the model, with the probability of each token and of its candidates.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from aiohttp import web

from tgis.api.http.openapi import make_document
from tgis.api.http.operations import Operation
from tgis.api.http.pages import docs
from tgis.api.http.pages.page import Page, make_page

_DOCUMENT_PATHS = ("/openapi.json", "/api-doc/openapi.json")  # the latter is TGI's
_HOST = re.compile(r"[\w.:\[\]-]{1,255}", re.ASCII)
_UI = Path(__file__).with_name("ui")
_UI_SCRIPTS = [f"{name}.js" for name in ("requests", "markdown", "answer", "card", "main")]  # of one script: in order


def page_routes(operations: Sequence[Operation], model: str, *, needs_token: bool) -> list[web.RouteDef]:
    """Made once, from what the APIs serve."""
    document = make_document(operations, needs_token=needs_token)
    encoded = msgspec.json.encode(document)
    pages = {"/docs": docs.render_page(document, model), "/ui": _ui()}

    async def get(request: web.Request) -> web.Response:
        if request.path.endswith("/"):  # addresses in pages are relative
            raise web.HTTPPermanentRedirect(f"..{request.path[:-1]}")
        if request.path in _DOCUMENT_PATHS:
            return web.Response(body=encoded, content_type="application/json")
        page, host = pages[request.path], request.host
        if _HOST.fullmatch(host):
            address = f"https://{host}" if request.secure else host
            page = replace(page, text=page.text.replace(docs.HOST, address))
        return page.response()

    return [web.get(path, get) for path in (*_DOCUMENT_PATHS, *pages)]


def _ui() -> Page:
    style, body, *scripts = ((_UI / name).read_text() for name in ("page.css", "page.html", *_UI_SCRIPTS))
    return make_page("tgis", body, style, "".join(scripts))
