"""Messages that clients have compressed. gRPC itself would decompress them without a bound: four megabytes to four
gigabytes, for each call.
"""

import asyncio
import zlib

from tgis.errors import InvalidRequest

# How gzip and zlib begin. Messages do not say that they are compressed, but a field of protobuf cannot begin with
# 0x1f, and none of ours has the number 15, for which 0x78 stands.
_MAGIC = (b"\x1f\x8b", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_ANY_FORMAT = zlib.MAX_WBITS | 32


async def decompress(data: bytes, max_bytes: int) -> bytes:
    """The message, or its first `max_bytes` if it has more; InvalidRequest if it is damaged."""
    if not data.startswith(_MAGIC):
        return data
    decompressor = zlib.decompressobj(_ANY_FORMAT)
    try:
        message = await asyncio.to_thread(decompressor.decompress, data, max_bytes)
    except zlib.error:
        raise InvalidRequest("", "the message cannot be decompressed") from None
    if not decompressor.eof and len(message) < max_bytes:
        raise InvalidRequest("", "the message cannot be decompressed")
    return message
