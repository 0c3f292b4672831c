"""The body of a request: bounded in size and time, paid for, and read as the type that a route wants."""

import asyncio
from typing import TypeVar

import msgspec
from aiohttp import web

from tgis.api.clients import MESSAGE_BYTE
from tgis.api.http.connections import Connection
from tgis.api.http.errors import HttpError
from tgis.errors import ClientTimeout
from tgis.frontend.calls import Account

_VALUE_BYTES = 64  # of memory, for what stands between two commas or brackets

B = TypeVar("B")


async def receive(request: web.Request, max_bytes: int, seconds: float) -> bytes:
    """The whole body; HttpError if it is too large, ClientTimeout if it has not arrived in time."""
    if "json" not in request.content_type.split("/")[-1].split("+"):
        raise HttpError(415, "Content-Type must be application/json")
    _check_size(request.content_length or 0, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            with Connection.of(request).receiving_body():
                while part := await request.content.readany():
                    body += part
                    _check_size(len(body), max_bytes)
    except TimeoutError:
        raise ClientTimeout(f"the body has not arrived within {seconds:g} s") from None
    except web.RequestPayloadError as error:
        raise HttpError(400, "the body is not framed as its headers say") from error
    return bytes(body)


def read_json(data: bytes, type_: type[B], account: Account) -> B:
    """HttpError if it is not JSON, or not what the type says."""
    num_values = sum(map(data.count, (b",", b"[", b"{")))
    account.charge(MESSAGE_BYTE * len(data) + _VALUE_BYTES * num_values)
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.ValidationError as error:
        raise HttpError(422, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise HttpError(413, f"the body has more than {max_bytes} bytes, PAYLOAD_LIMIT")
