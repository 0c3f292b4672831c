"""The body of a request: bounded in size and time."""

from aiohttp import web

from tgis.api.http.connections import MISFRAMED, READ_BUFFER_BYTES, Connection
from tgis.api.http.operations import HttpError
from tgis.errors import RequestError

_WIRE_BYTES = 2  # for each that a body may have: chunks of a few bytes are mostly framing


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
