"""What the operations of all HTTP APIs share: who calls, what a call holds in memory, and how it ends."""

import asyncio
import logging
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tgis.api.clients import MESSAGE_BYTE, Account, Clients, CountCall
from tgis.api.http.auth import HttpAuth
from tgis.api.http.connections import MISFRAMED, READ_BUFFER_BYTES, Connection
from tgis.api.http.event_stream import EventStream
from tgis.api.http.operations import Handle, HttpError, Operation, http_status
from tgis.config import Config
from tgis.errors import RequestError, Unavailable
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.generation import Generator
from tgis.frontend.metric_families import FailureReason
from tgis.frontend.output import RequestOutput
from tgis.frontend.params import Params
from tgis.utils import logs

_REFUSALS = (400, 413, 415, 422)
_FAILED = "failed"  # the status of a stream that failed after it had begun
_CLIENT_CLOSED = 499  # of a call whose client has gone, as in nginx
_ID_HEADERS = ("x-request-id", "x-correlation-id")
_WIRE_BYTES = 2  # for each that a body may have: chunks of a few bytes are mostly framing
_VALUE_BYTES = 64  # of memory, for what stands between two commas or brackets of a body
_ENUM_VALUE = re.compile(r"Invalid enum value '.*'(?= - at |$)", re.DOTALL)  # the client's text, of any length

B = TypeVar("B")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class HttpCall:
    """A request to an API as its route sees it: authenticated, and with a generator that takes calls."""

    request: web.Request
    config: Config
    generator: Generator
    account: Account
    identity: bytes
    api: str  # in logs
    kind: CallKind | None  # that metrics count if it is refused, until the generator does
    events: EventStream | None = None
    data: bytes | None = None

    async def body(self, type_: type[B]) -> B:
        """The request's JSON; HttpError if it is anything else, or not what the type says."""
        return self.parse(await self.receive(), type_)

    async def receive(self) -> bytes:
        """The request's body; HttpError if it is not JSON or too large, ClientTimeout if it does not come."""
        if self.data is None:
            self.data = await receive(self.request)
        return self.data

    def parse(self, data: bytes, type_: type[B], *, strict: bool = True) -> B:
        """The body as a value; unless `strict`, 16.0 and "16" are the integer 16, and so on."""
        num_values = sum(map(data.count, (b",", b"[", b"{")))
        self.account.charge(MESSAGE_BYTE * len(data) + _VALUE_BYTES * num_values)
        try:
            return msgspec.json.decode(data, type=type_, strict=strict)
        except msgspec.ValidationError as error:
            raise HttpError(422, _ENUM_VALUE.sub("Invalid enum value", str(error))) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from None

    def generate_call(
        self,
        params: Params,
        texts: list[str],
        fields: list[str],
        adapter: str | None,
        *,
        n: int,
        stream: bool,
        token_ids: list[list[int]] | None = None,
    ) -> GenerateCall:
        """The call that the front end gets: `n` outputs of each text."""
        self.kind = None
        unary = CallKind.SINGLE if len(texts) * n == 1 else CallKind.BATCH
        return GenerateCall(
            kind=CallKind.STREAM if stream else unary,
            texts=texts,
            fields=fields,
            params=params,
            account=self.account,
            token_ids=token_ids,
            api=self.api,
            identity=self.identity,
            adapter=("adapter_id", adapter) if adapter else None,
            n=n,
            headers=self.request.headers.items(),
        )

    def special_token_ids(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The ids of the texts that are special tokens, as far as the model can generate them."""
        tokenizer, vocab_size = self.generator.token_decoder.tokenizer, self.generator.server_info.limits.vocab_size
        found = map(tokenizer.special_token_id, texts)
        return tuple(each for each in found if each is not None and each < vocab_size)

    def compute_headers(self, prompts: Iterable[str]) -> dict[str, str]:
        """Headers of TGI, which say where the answer is computed, and the length of the prompts."""
        kind = f"{self.config.num_shard}-{self.generator.server_info.engine.device}"
        return {"x-compute-type": kind, "x-compute-characters": str(sum(map(len, prompts)))}

    def event_stream(self, headers: Mapping[str, str]) -> EventStream:
        """The answer, which begins with its first event: errors before that have a status."""
        self.events = EventStream(self.request, {"x-request-id": logs.correlation_id() or "", **headers})
        return self.events


async def receive(request: web.Request) -> bytes:
    """The whole body; HttpError if it is too large or none, ClientTimeout if it has not arrived in time."""
    if "json" not in request.content_type.split("/")[-1].split("+"):
        raise HttpError(415, "Content-Type must be application/json")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise HttpError(415, "Content-Encoding must be identity: compressed bodies are not read")
    connection, body, limit = Connection.of(request), bytearray(), request.client_max_size
    try:
        with connection.receiving_body(request.content):
            while piece := await request.content.readany():
                body += piece
                if len(body) > limit:
                    raise HttpError(413, f"the body has more than {limit} bytes, PAYLOAD_LIMIT")
                if connection.received > _WIRE_BYTES * limit + READ_BUFFER_BYTES:
                    raise HttpError(413, "the chunks of the body are too small")
        return bytes(body)
    except (TimeoutError, web.RequestPayloadError) as error:
        request.content.set_exception(TimeoutError())  # else it keeps the error, whose frames have the request
        reason = error.args[0]
        raise reason if isinstance(reason, RequestError) else HttpError(400, MISFRAMED) from None


def best_first(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Sort by the mean of the logprobs of the tokens, which must have been asked for; of equal ones the first."""
    return sorted(outputs, key=_mean_logprob, reverse=True)


def _mean_logprob(output: RequestOutput) -> float:
    mean = sum(token.logprob for token in output.tokens) / len(output.tokens) if output.tokens else math.nan
    return -math.inf if math.isnan(mean) else mean


def json_response(body: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer that is a value of msgspec, or JSON already."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(body=data, content_type="application/json", headers=headers)


class HttpApi:
    """Runs the calls of all APIs; Unavailable while `generator` is None."""

    def __init__(self, config: Config, auth: HttpAuth, clients: Clients, count: CountCall) -> None:
        self.generator: Generator | None = None
        self._count = count
        self._config = config
        self._auth = auth
        self._clients = clients

    def route(self, operation: Operation) -> web.RouteDef:
        """The route of an operation; whatever its handler raises, the call ends as its API says."""

        async def respond(request: web.Request) -> web.StreamResponse:
            request_id = _request_id(request)
            status = _CLIENT_CLOSED
            try:
                with logs.correlation_scope(request_id):
                    response = await self._respond(request, operation)
                status = request.get(_FAILED, response.status)
            finally:
                self._count(operation.errors.api, operation.path, str(status))
            if not response.prepared:
                response.headers["x-request-id"] = request_id
            return response

        add = {"GET": web.get, "POST": web.post}[operation.method]  # with HEAD where there is GET
        return add(operation.path, respond)

    async def _respond(self, request: web.Request, operation: Operation) -> web.StreamResponse:
        call: HttpCall | None = None
        try:
            self._auth.check(request)
            if self.generator is None:
                raise Unavailable("the model is still loading")
            identity = self._auth.identity(request)
            with self._clients.account(identity, request.remote or "") as account:
                given = account, identity, operation.errors.api, operation.kind
                call = HttpCall(request, self._config, self.generator, *given)
                return await self._handle(operation.handle, call)
        except RequestError as error:
            if call is not None and call.kind is not None and http_status(error) in _REFUSALS:
                call.generator.metrics.request_started(call.kind, 1)
                call.generator.metrics.request_failed(FailureReason.VALIDATION)
            if call is None or call.events is None or not call.events.response.prepared:
                return operation.errors.response(error)
            request[_FAILED], _ = operation.errors.convert(error)
            return await call.events.fail(error, operation.errors)
        finally:
            if call is not None and call.events is not None:
                call.events.close()

    async def _handle(self, handle: Handle, call: HttpCall) -> web.StreamResponse:
        connection, until = Connection.of(call.request), asyncio.timeout(None)
        try:
            async with until:
                connection.call_until = until
                return await handle(call)
        except (RequestError, ConnectionError):  # the latter if the client has gone
            raise
        except RecursionError:  # some depths can be read, but not written again
            raise HttpError(400, "the body is nested too deeply") from None
        except Exception as error:
            if until.expired():
                raise Unavailable("the server is shutting down") from None
            log.exception("internal error in a call")
            raise HttpError(500, f"internal error: {type(error).__name__}") from error
        finally:
            connection.call_until = None
            del connection, until  # the task keeps its CancelledError, whose frames have these


def _request_id(request: web.Request) -> str:
    """The client's, or a new one."""
    given = next((request.headers[name] for name in _ID_HEADERS if name in request.headers), "")
    return given if given.isascii() and given.isprintable() and given else uuid.uuid4().hex
