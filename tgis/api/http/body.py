"""The body of a request: bounded in size and time, paid for, and read as the type that a route wants."""

from typing import TypeVar

import msgspec
from aiohttp import web

from tgis.api.clients import MESSAGE_BYTE
from tgis.api.http.connections import MISFRAMED, READ_BUFFER_BYTES, Connection
from tgis.api.http.operations import HttpError
from tgis.errors import RequestError
from tgis.frontend.calls import Account

_WIRE_BYTES = 2  # for each that a body may have: chunks of a few bytes are mostly framing
_VALUE_BYTES = 64  # of memory, for what stands between two commas or brackets

B = TypeVar("B")


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


def read_json(data: bytes, type_: type[B], account: Account, *, strict: bool) -> B:
    """HttpError if it is not JSON, or not what the type says; unless `strict`, it may say it in another way."""
    num_values = sum(map(data.count, (b",", b"[", b"{")))
    account.charge(MESSAGE_BYTE * len(data) + _VALUE_BYTES * num_values)
    try:
        return msgspec.json.decode(data, type=type_, strict=strict)
    except msgspec.ValidationError as error:
        raise HttpError(422, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None
