"""`/ui`, `/docs` and the OpenAPI document: without a token, even while the model is loading.

`/ui` is a page to try the model, with the probability of each token and of its candidates. `/docs` lists the
operations. A page is one file, and its policy lets a browser run and load nothing else.
"""

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec
from aiohttp import web

from tgis.api.http.openapi import Json, make_document
from tgis.api.http.operations import Operation
from tgis.api.http.responses import NO_STORE, json_response

_DOCUMENT_PATHS = ("/openapi.json", "/api-doc/openapi.json")  # the latter is TGI's
_DIRECTORY = Path(__file__).parent
_UI_SCRIPTS = [f"{name}.js" for name in ("requests", "markdown", "answer", "card", "main")]  # one script, in this order
_DOCS_STYLE = "body { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }"
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = NO_STORE | {
    "Content-Type": "text/html; charset=utf-8",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes(operations: Sequence[Operation], model: str, *, needs_token: bool) -> list[web.RouteDef]:
    """The routes of the pages and of the OpenAPI document of these operations."""
    document = make_document(operations, needs_token=needs_token)
    encoded = msgspec.json.encode(document)

    async def get_document(_request: web.Request) -> web.Response:
        return json_response(encoded)

    return [
        *(web.get(path, get_document) for path in _DOCUMENT_PATHS),
        _docs_route(document, model),
        _ui_route(),
    ]


def _docs_route(document: Json, model: str) -> web.RouteDef:
    title = escape(f"{document['info']['title']} {document['info']['version']}, serving {model}")
    links = '<p><a href="ui">Try the model</a> · <a href="openapi.json">OpenAPI document</a>, with all fields</p>'
    rows = "".join(
        f"<tr><td><code>{method.upper()} {escape(path)}</code><td>{escape(operation['summary'])}"
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    table = f'<div class="wide" tabindex="0"><table><tr><th>Operation<th>Summary</tr>{rows}</table></div>'
    return _page_route("/docs", title, f"<main><h1>{title}</h1>{links}{table}</main>", _DOCS_STYLE)


def _ui_route() -> web.RouteDef:
    style, body, *scripts = ((_DIRECTORY / "ui" / name).read_text() for name in ("page.css", "page.html", *_UI_SCRIPTS))
    return _page_route("/ui", "tgis", body, style, "".join(scripts))


def _page_route(path: str, title: str, body: str, style: str, script: str = "") -> web.RouteDef:
    """The route of a page; with a script, the page may send requests to this server."""
    style = (_DIRECTORY / "page.css").read_text() + style
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{title}</title><style>{style}</style>"
    policy = f"{_POLICY}; style-src {_source(style)}"
    if script:
        head += f'<script type="module">{script}</script>'
        policy += f"; script-src {_source(script)}; connect-src 'self'"
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'
    headers = _HEADERS | {"Content-Security-Policy": policy}

    async def get(request: web.Request) -> web.Response:
        if request.path.endswith("/"):  # addresses in pages are relative
            raise web.HTTPPermanentRedirect(f"..{request.path[:-1]}")
        return web.Response(text=page, headers=headers)

    return web.get(path, get)


def _source(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
