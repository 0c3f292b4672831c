"""What the routes of all faces share: who calls, what a call holds in memory, and how it ends."""

import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from tgis.api.clients import Account, Clients
from tgis.api.http.auth import HttpAuth, client_address
from tgis.api.http.body import read_json, receive
from tgis.api.http.errors import Face, HttpError, error_response
from tgis.api.http.event_stream import EventStream
from tgis.config import Config
from tgis.errors import RequestError, Unavailable
from tgis.frontend.generation import Generator
from tgis.utils import logs

_ID_HEADERS = ("x-request-id", "x-correlation-id")

B = TypeVar("B")

log = logging.getLogger(__name__)


class HttpCall:
    """A request to an API as its route sees it: authenticated, and with a generator that takes calls."""

    def __init__(
        self, request: web.Request, config: Config, generator: Generator, account: Account, identity: bytes
    ) -> None:
        self.request = request
        self.generator = generator
        self.account = account
        self.identity = identity
        self.correlation_id = logs.correlation_id()
        self.events: EventStream | None = None
        self._config = config
        self._data: bytes | None = None  # the body, once it has been read

    async def body(self, type_: type[B]) -> B:
        """The request's JSON; HttpError if it is anything else, or not what the type says."""
        if self._data is None:
            limit, seconds = self._config.payload_limit, self._config.client_timeout_seconds
            self._data = await receive(self.request, limit, seconds)
        return read_json(self._data, type_, self.account)

    async def run(self, cost: float, job: Callable[[], B]) -> B:
        """Run the job, in a thread if it takes long; `cost` is about how many microseconds that is."""
        return await self.generator.pool.run(cost, job)

    def compute_headers(self, prompts: Iterable[str]) -> dict[str, str]:
        """As in TGI: where the answer is computed, and the length of the prompts."""
        kind = f"{self._config.num_shard}-{self.generator.server_info.engine.device}"
        return {"x-compute-type": kind, "x-compute-characters": str(sum(map(len, prompts)))}

    def event_stream(self, headers: Mapping[str, str] | None = None) -> EventStream:
        """The answer, which begins with its first event: errors before that have a status."""
        self.events = EventStream(self.request, {"x-request-id": self.correlation_id or "", **(headers or {})})
        return self.events


Handle = Callable[[HttpCall], Awaitable[web.StreamResponse]]


def json_response(body: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer that is a value of msgspec, or JSON already."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(body=data, content_type="application/json", headers=headers)


class HttpApi:
    """Runs the calls of all faces; Unavailable while `generator` is None."""

    def __init__(self, config: Config, auth: HttpAuth, clients: Clients) -> None:
        self.generator: Generator | None = None
        self._config = config
        self._auth = auth
        self._clients = clients

    def handler(self, handle: Handle, face: Face) -> Handler:
        """A handler for a route; whatever `handle` raises, the call ends as the face says."""

        async def respond(request: web.Request) -> web.StreamResponse:
            request_id = _request_id(request)
            with logs.correlation_scope(request_id):
                response = await self._respond(request, handle, face)
            if not response.prepared:
                response.headers["x-request-id"] = request_id
            return response

        return respond

    async def _respond(self, request: web.Request, handle: Handle, face: Face) -> web.StreamResponse:
        events: EventStream | None = None
        try:
            self._auth.check(request)
            with self._admitted(request) as call:
                try:
                    return await _handle(handle, call)
                finally:
                    events = call.events
        except RequestError as error:
            if events is None or not events.has_begun:
                return error_response(error, face)
            return await events.fail(face.error_body(error), face.last_event)
        finally:
            if events is not None:
                events.close()

    @contextmanager
    def _admitted(self, request: web.Request) -> Iterator[HttpCall]:
        if self.generator is None:
            raise Unavailable("the model is still loading")
        client = identity = self._auth.identity(request)
        if not client and self._config.limit_by_address:
            client = client_address(request)
        with Account(self._clients, client) as account:
            yield HttpCall(request, self._config, self.generator, account, identity)


async def _handle(handle: Handle, call: HttpCall) -> web.StreamResponse:
    try:
        return await handle(call)
    except (RequestError, ConnectionError):  # the latter if the client has gone
        raise
    except Exception as error:
        log.exception("internal error in a call")
        raise HttpError(500, f"internal error: {type(error).__name__}") from error


def _request_id(request: web.Request) -> str:
    """The client's, or a new one."""
    given = next((request.headers[name] for name in _ID_HEADERS if name in request.headers), "")
    return given if given.isascii() and given.isprintable() and given else uuid.uuid4().hex
