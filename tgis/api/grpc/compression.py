"""Compressed messages. gRPC itself would decompress them on the event loop, for some milliseconds each."""

import asyncio
import zlib

from tgis.errors import InvalidRequest

# gRPC does not say which messages are compressed: no protobuf begins like gzip, and no message of ours like deflate.
_GZIP, _DEFLATE = b"\x1f\x8b", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_EITHER = zlib.MAX_WBITS | 32


async def decompressed(data: bytes, max_bytes: int) -> bytes:
    """What was compressed, in a thread; InvalidRequest if it has more than `max_bytes`."""
    if not data.startswith((_GZIP, *_DEFLATE)):
        return data
    if data.startswith(_GZIP) and int.from_bytes(data[-4:], "little") > max_bytes:  # as it says itself
        raise _too_large(max_bytes)
    return await asyncio.to_thread(_decompress, data, max_bytes)


def _decompress(data: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj(_EITHER)
    try:
        message = stream.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest("", f"the message cannot be decompressed: {error}") from None
    if len(message) > max_bytes:
        raise _too_large(max_bytes)
    if not stream.eof or stream.unused_data:
        raise InvalidRequest("", "the message cannot be decompressed: it is not one whole stream")
    return message


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest("", f"the message has more than {max_bytes} bytes, decompressed")
