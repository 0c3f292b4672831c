"""The body of a request: bounded in size and time, paid for, and read as the type that a route wants."""

from typing import TypeVar

import msgspec
from aiohttp import web

from tgis.api.clients import MESSAGE_BYTE
from tgis.api.http.connections import Connection
from tgis.api.http.operations import HttpError
from tgis.errors import ClientTimeout
from tgis.frontend.calls import Account

_VALUE_BYTES = 64  # of memory, for what stands between two commas or brackets

B = TypeVar("B")


async def receive(request: web.Request) -> bytes:
    """The whole body; HttpError if it is too large, ClientTimeout if it has not arrived in time."""
    if "json" not in request.content_type.split("/")[-1].split("+"):
        raise HttpError(415, "Content-Type must be application/json")
    try:
        with Connection.of(request).receiving_body(request.content):
            return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise HttpError(413, f"the body has more than {request.client_max_size} bytes, PAYLOAD_LIMIT") from None
    except (TimeoutError, web.RequestPayloadError) as error:
        error.__traceback__ = None  # a frame there has the request, whose content has the error
        if isinstance(error, TimeoutError):
            raise ClientTimeout(str(error)) from None
        raise HttpError(400, "the body is not framed as its headers say") from error


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
