"""Between bytes and messages. Fields are counted in the bytes, before protobuf makes objects of them."""

import functools
from typing import TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from tgis.errors import InvalidRequest

M = TypeVar("M", bound=Message)
Schema: TypeAlias = "dict[int, Schema]"  # the fields of a message that are messages, too

_MAX_OTHER_FIELDS = 1024  # parameters, stop sequences and ids: a valid message has some 40 of them at most
_FIELDS_PER_INPUT = 2  # itself and its text


def parse(data: bytes, message_type: type[M], max_inputs: int = 0) -> M:
    """The message; InvalidRequest if it is none, or has more fields than so many inputs and all else can have."""
    max_fields = _MAX_OTHER_FIELDS + _FIELDS_PER_INPUT * max_inputs
    try:
        if len(data) > max_fields:  # a field takes a byte at least
            _count_fields(data, 0, len(data), _schema(message_type.DESCRIPTOR), max_fields)
        return message_type.FromString(data)
    except (DecodeError, IndexError):
        raise InvalidRequest("", "the message cannot be decoded") from None
    except _TooManyFields:
        text = f"the message has more than {max_fields} fields, which is enough for {max_inputs} inputs"
        raise InvalidRequest("requests" if max_inputs else "", text) from None


def length_delimited(number: int, parts: list[bytes]) -> list[bytes]:
    """A field whose content, a message for example, is serialized already; to be concatenated once, at the end."""
    return [_to_varint(number << 3 | 2) + _to_varint(sum(map(len, parts))), *parts]


class _TooManyFields(Exception):
    pass


def _count_fields(data: bytes, at: int, end: int, schema: Schema, limit: int) -> int:
    """How many are left of `limit`; IndexError if the bytes end too early.

    What this takes depends on the limit, not on the message. Groups, which no message here has, count as empty fields.
    """
    while at < end:
        limit -= 1
        if limit < 0:
            raise _TooManyFields
        tag, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                length, at = (data[at], at + 1) if data[at] < 0x80 else _varint(data, at)
                if tag >> 3 in schema:
                    limit = _count_fields(data, at, at + length, schema[tag >> 3], limit)
                at += length
            case 5:
                at += 4
    return limit


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for index in range(10):
        value |= (data[at + index] & 0x7F) << 7 * index
        if data[at + index] < 0x80:
            return value, at + index + 1
    raise IndexError


def _to_varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


@functools.cache
def _schema(message: Descriptor) -> Schema:
    return {field.number: _schema(field.message_type) for field in message.fields if field.message_type is not None}
