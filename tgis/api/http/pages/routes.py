"""`/ui`, `/docs` and the OpenAPI document: without a token, even while the model is loading.

`/ui` is a page to try the model, with the probability of each token and of its candidates. `/docs` lists the
operations.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec
from aiohttp import web

from tgis.api.http.openapi import Json, make_document
from tgis.api.http.operations import Operation
from tgis.api.http.pages.page import Page, make_page, table

_DOCUMENT_PATHS = ("/openapi.json", "/api-doc/openapi.json")  # the latter is TGI's
_UI = Path(__file__).with_name("ui")
_UI_SCRIPTS = [f"{name}.js" for name in ("requests", "markdown", "answer", "card", "main")]  # of one script: in order
_DOCS_STYLE = "body { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }"


def page_routes(operations: Sequence[Operation], model: str, *, needs_token: bool) -> list[web.RouteDef]:
    """Made once, from what the APIs serve."""
    document = make_document(operations, needs_token=needs_token)
    encoded = msgspec.json.encode(document)
    pages = {"/docs": _docs(document, model), "/ui": _ui()}

    async def get(request: web.Request) -> web.Response:
        if request.path.endswith("/"):  # addresses in pages are relative
            raise web.HTTPPermanentRedirect(f"..{request.path[:-1]}")
        if request.path in _DOCUMENT_PATHS:
            return web.Response(body=encoded, content_type="application/json")
        return pages[request.path].response()

    return [web.get(path, get) for path in (*_DOCUMENT_PATHS, *pages)]


def _docs(document: Json, model: str) -> Page:
    title = f"{document['info']['title']} {document['info']['version']}, serving {model}"
    operations = (
        (f"<code>{method.upper()} {escape(path)}</code>", escape(operation["summary"]))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    links = '<p><a href="ui">Try the model</a> · <a href="openapi.json">OpenAPI document</a>, with all fields</p>'
    body = f"<main><h1>{escape(title)}</h1>{links}{table(('Operation', 'Summary'), operations)}</main>"
    return make_page(title, body, _DOCS_STYLE)


def _ui() -> Page:
    style, body, *scripts = ((_UI / name).read_text() for name in ("page.css", "page.html", *_UI_SCRIPTS))
    return make_page("tgis", body, style, "".join(scripts))
