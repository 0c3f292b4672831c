"""`/ui`, `/docs` and the OpenAPI document: for everybody who may use the APIs, while the model is loading, too.

`/ui` is a page to try the model, with the probability of each token and of its candidates.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from tgis.api.http.auth import HttpAuth
from tgis.api.http.openapi import make_document
from tgis.api.http.operations import HttpError, Operation
from tgis.api.http.pages import docs
from tgis.api.http.pages.page import Page, make_page

_DOCUMENT_PATHS = ("/openapi.json", "/api-doc/openapi.json")  # the latter is TGI's
_UI = Path(__file__).with_name("ui")
_UI_SCRIPTS = ("requests.js", "answer.js", "card.js", "main.js")  # one script, in which each uses those before


class Pages:
    """Made once, from what the APIs serve."""

    def __init__(self, operations: Sequence[Operation], auth: HttpAuth) -> None:
        document = make_document(operations, needs_token=auth.needed)
        self._auth = auth
        self._errors = operations[0].errors
        self._document = msgspec.json.encode(document)
        self._pages = {"/docs": docs.render_page(document), "/ui": _ui()}

    def routes(self) -> list[web.RouteDef]:
        return [web.get(path, self._get) for path in (*_DOCUMENT_PATHS, *self._pages)]

    async def _get(self, request: web.Request) -> web.Response:
        try:
            self._auth.check(request)
        except HttpError as error:
            return self._errors.response(error)
        if request.path in _DOCUMENT_PATHS:
            return web.Response(body=self._document, content_type="application/json")
        return self._pages[request.path].response()


def _ui() -> Page:
    style, body, *scripts = ((_UI / name).read_text() for name in ("page.css", "page.html", *_UI_SCRIPTS))
    return make_page("tgis", body, style, "".join(scripts))
