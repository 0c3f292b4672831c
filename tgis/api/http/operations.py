"""What a face serves: each operation with the types of its bodies, of which the routes and the document are made."""

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tgis.api.http.calls import Handle, HttpApi
from tgis.api.http.errors import Face


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path; `request`, `response` and `event` are types that msgspec encodes, None for no body.

    A tuple of types for the request: the body is one of these.
    """

    method: str
    path: str
    handle: Handle
    face: Face
    id: str
    summary: str
    request: Any = None
    response: Any = None
    event: Any = None  # of the stream that the answer may be

    @property
    def requests(self) -> tuple[Any, ...]:
        """The types that the body may have."""
        if self.request is None:
            return ()
        return self.request if isinstance(self.request, tuple) else (self.request,)

    def route(self, api: HttpApi) -> web.RouteDef:
        add = {"GET": web.get, "POST": web.post}[self.method]  # with HEAD where there is GET
        return add(self.path, api.handler(self.handle, self.face))
