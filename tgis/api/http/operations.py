"""The operations of an HTTP API, and the path that all of their calls take.

A call needs a token, then a place among the open calls; its body is read in full before it counts as running.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from tgis.api.http.auth import HttpAuth
from tgis.api.http.calls import HttpCall
from tgis.api.http.errors import ErrorFormat, HttpError, http_status
from tgis.config import Config
from tgis.errors import ClientTimeout, RequestError
from tgis.frontend.admission import Admission
from tgis.frontend.calls import CallKind
from tgis.frontend.generation import Generator, loaded
from tgis.frontend.metric_families import FailureReason
from tgis.frontend.metrics import CountCall
from tgis.utils import logs

Handle = Callable[[HttpCall], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
_FAILED_STREAM_STATUS = web.RequestKey("failed", int)
_REFUSALS = (400, 413, 415, 422)
_CLIENT_CLOSED_REQUEST = 499  # no standard has one; proxies log this number of nginx
_ID_HEADERS = ("x-request-id", "x-correlation-id")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path; bodies are types that msgspec encodes, None for no body.

    In the OpenAPI document it has the name of its handler and the first line of its docstring. The body of a request
    has one of the types in `requests`, the answer is a `response` or a stream of `event`s. `kind` is counted as failed
    if the body is refused; None for operations that do not generate.
    """

    method: str
    path: str
    handle: Handle
    errors: ErrorFormat
    requests: tuple[Any, ...] = ()
    response: Any = None
    event: Any = None
    kind: CallKind | None = CallKind.SINGLE


class HttpApi:
    """Runs the calls of all APIs; Unavailable until `generator` is done."""

    def __init__(
        self,
        config: Config,
        auth: HttpAuth,
        admission: Admission,
        count: CountCall,
        generator: asyncio.Future[Generator],
    ) -> None:
        self._config = config
        self._auth = auth
        self._admission = admission
        self._count = count
        self._generator = generator

    def route(self, operation: Operation) -> web.RouteDef:
        """The route of an operation; whatever its handler raises, the call ends as its API says."""

        async def respond(request: web.Request) -> web.StreamResponse:
            status = _CLIENT_CLOSED_REQUEST
            request[REQUEST_ID] = request_id = _request_id(request)
            try:
                with logs.correlation_scope(request_id):
                    response = await self._respond(request, operation)
                status = request.get(_FAILED_STREAM_STATUS, response.status)
                return response
            finally:
                self._count(operation.errors.api, operation.path, str(status))

        add = {"GET": web.get, "POST": web.post}[operation.method]  # not web.route: web.get serves HEAD, too
        return add(operation.path, respond)

    async def _respond(self, request: web.Request, operation: Operation) -> web.StreamResponse:
        call: HttpCall | None = None
        try:
            call = self._open(request, operation)
            with self._admission.calls.hold(call.client, 1):
                if operation.requests:
                    call.data = await _read_body(request, self._config.client_timeout_seconds)
                async with self._admission.running(call.client, len(call.data)):
                    response = await operation.handle(call)
                    await response.prepare(request)
                    await response.write_eof()
                    return response
        except ConnectionError:  # the client has gone
            raise
        except RequestError as error:
            failure = error
        except RecursionError:  # some depths can be read, but not written again
            failure = HttpError(400, "the body is nested too deeply")
        except Exception as error:
            log.exception("internal error in a call")
            failure = HttpError(500, f"internal error: {type(error).__name__}")
        finally:
            if call is not None and call.events is not None:
                call.events.close()
        return await _fail(call, request, operation.errors, failure)

    def _open(self, request: web.Request, operation: Operation) -> HttpCall:
        self._auth.check(request)
        identity, inputs = self._auth.identity(request), self._admission.inputs
        client = self._admission.client(identity, request.remote or "")
        return HttpCall(
            request=request,
            config=self._config,
            generator=loaded(self._generator),
            client=client,
            max_inputs=inputs.most(client),
            identity=identity,
            errors=operation.errors,
            kind=operation.kind,
        )


async def _read_body(request: web.Request, seconds: float) -> bytes:
    """The whole body; HttpError if it is not JSON or too large, ClientTimeout if it has not arrived in time."""
    if "json" not in request.content_type.split("/")[-1].split("+"):
        raise HttpError(415, "Content-Type must be application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpError(415, "Content-Encoding must be identity: compressed bodies are not read")
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except TimeoutError:
        raise ClientTimeout(seconds) from None
    except web.HTTPRequestEntityTooLarge:
        raise HttpError(413, f"the body has more than {request.client_max_size} bytes, PAYLOAD_LIMIT") from None
    except web.RequestPayloadError:
        raise HttpError(400, "malformed request body") from None


async def _fail(
    call: HttpCall | None, request: web.Request, errors: ErrorFormat, error: RequestError
) -> web.StreamResponse:
    """Answer with an error, which is the last event of a stream that has begun."""
    _count_refusal(call, error)
    if call is None or call.events is None or not call.events.response.prepared:
        return errors.response(error)
    request[_FAILED_STREAM_STATUS], _ = errors.convert(error)
    return await call.events.fail(error, errors)


def _count_refusal(call: HttpCall | None, error: RequestError) -> None:
    """Count a call to generate that is refused before the generator counts it."""
    if call is not None and call.kind is not None and http_status(error) in _REFUSALS:
        call.generator.metrics.request_started(call.kind, 1)
        call.generator.metrics.request_failed(FailureReason.VALIDATION)


def _request_id(request: web.Request) -> str:
    """The client's, or a new one."""
    given = next((request.headers[name] for name in _ID_HEADERS if name in request.headers), "")
    return given if given.isascii() and given.isprintable() and given else uuid.uuid4().hex
