"""From bytes to messages. Fields are counted in the bytes, before protobuf makes objects of them."""

import functools
from typing import TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from tgis.errors import InvalidRequest

M = TypeVar("M", bound=Message)
Schema: TypeAlias = "dict[int, Schema]"  # the fields of a message that are messages, too

_MAX_OTHER_FIELDS = 2048  # parameters, entries of their lists and ids: a valid message has some 1,100 at most
_FIELDS_PER_INPUT = 2  # itself and its text
_LENGTH_DELIMITED = 2
# Bytes by wire type; varints are parsed elsewhere, and no message has groups.
_BYTES = {1: 8, 5: 4, 3: 0, 4: 0, 6: 0, 7: 0}


def parse(data: bytes, message_type: type[M], max_inputs: int = 0) -> M:
    """The message; InvalidRequest if it is none, or has more fields than so many inputs and all else can have.

    What counting takes depends on the limit, not on the message.
    """
    max_fields = _MAX_OTHER_FIELDS + _FIELDS_PER_INPUT * max_inputs
    try:  # a field takes a byte at least
        if len(data) > max_fields and _has_more_fields(data, _schema(message_type.DESCRIPTOR), max_fields):
            text = f"the message has more than {max_fields} fields, which is enough for {max_inputs} inputs"
            raise InvalidRequest("requests" if max_inputs else "", text)
        return message_type.FromString(data)
    except (DecodeError, IndexError):
        raise InvalidRequest("", "the message cannot be decoded") from None


def _has_more_fields(data: bytes, schema: Schema, limit: int) -> bool:
    """Count fields, those of inner messages included, up to the limit; IndexError if bytes are missing."""
    at, end = 0, len(data)
    num_fields = 0
    outer: list[tuple[int, Schema]] = []  # messages that this one is in, each with its end
    while num_fields <= limit:
        while at >= end:
            at = end
            if not outer:
                return False
            end, schema = outer.pop()
        num_fields += 1
        tag, at = data[at], at + 1
        if tag >= 0x80:  # most numbers have one byte
            tag, at = _read_varint(data, at - 1)
        if tag & 7 != _LENGTH_DELIMITED:
            at = at + _BYTES[tag & 7] if tag & 7 in _BYTES else _read_varint(data, at)[1]
            continue
        length, at = data[at], at + 1
        if length >= 0x80:
            length, at = _read_varint(data, at - 1)
        if length and (inner := schema.get(tag >> 3)) is not None:
            outer.append((end, schema))
            end, schema = at + length, inner
        else:
            at += length
    return True


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for index in range(10):
        byte = data[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise IndexError


@functools.cache
def _schema(message: Descriptor) -> Schema:
    return {field.number: _schema(field.message_type) for field in message.fields if field.message_type is not None}
