"""`/ui`, `/docs` and the OpenAPI document: for everybody who may use the APIs, while the model is loading, too."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from tgis.api.http.auth import HttpAuth
from tgis.api.http.errors import HttpError, error_response
from tgis.api.http.openapi import make_document
from tgis.api.http.operations import Operation
from tgis.api.http.pages import docs, ui
from tgis.api.http.pages.page import make_page, wants_page

_DOCUMENT_PATHS = ("/openapi.json", "/api-doc/openapi.json")  # the latter is TGI's
_REFUSED = """
<main class="message"><h1>A valid bearer token is required</h1>
<p>Browsers send none by themselves: open this page through a proxy that adds it to requests.</p></main>
"""


class Pages:
    """Made once, from what the APIs serve."""

    def __init__(self, operations: Sequence[Operation], auth: HttpAuth) -> None:
        document = make_document(operations, needs_token=auth.needed)
        self._auth = auth
        self._face = operations[0].face
        self._document = msgspec.json.encode(document)
        self._pages = {"/docs": docs.render_page(document), "/ui": ui.render_page()}
        self._refused_page = make_page("A bearer token is required", _REFUSED)

    def routes(self) -> list[web.RouteDef]:
        documents = [web.get(path, self._get_document) for path in _DOCUMENT_PATHS]
        return [*documents, *(web.get(path, self._get_page) for path in self._pages)]

    async def _get_document(self, request: web.Request) -> web.Response:
        return self._refused(request) or web.Response(body=self._document, content_type="application/json")

    async def _get_page(self, request: web.Request) -> web.Response:
        return self._refused(request) or self._pages[request.path].response()

    def _refused(self, request: web.Request) -> web.Response | None:
        try:
            self._auth.check(request)
        except HttpError as error:
            if not wants_page(request):
                return error_response(error, self._face)
            response = self._refused_page.response(error.status)
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return None
