"""Between bytes and messages. Fields are counted in the bytes, before protobuf makes objects of them.

Large and frequent messages are written without objects, and small ones read into the same object: each has a block of
memory, and after every 10,000 blocks protobuf has the C library return all free memory to the system, which takes up to
100 ms (malloc_trim).
"""

import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tgis.errors import InvalidRequest
from tgis.utils.slices import Slicer

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Schema: TypeAlias = "dict[int, Schema]"  # the fields of a message that are messages, too

_SMALL_BYTES = 16 << 10  # of a message
_MAX_SHARED_BYTES = 256 << 10  # of messages read into one object, which may be 30 times as large in memory
_MAX_OTHER_FIELDS = 1024  # parameters, stop sequences and ids: a valid message has some 40 of them at most
_FIELDS_PER_INPUT = 2  # itself and its text
FIELDS_PER_SLICE = 1024  # a fifth of a millisecond
_BYTES_PER_SLICE_UNIT = 256  # of a message
_VARINT, _LENGTH_DELIMITED, _FIXED32 = 0, 2, 5
_WIRE_TYPES = {
    FieldDescriptor.TYPE_STRING: _LENGTH_DELIMITED,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH_DELIMITED,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
}
_FLOAT32 = struct.Struct("<f")
_ZERO = bytes(4)
_ONE_BYTE = [bytes((value,)) for value in range(0x80)]


def parse(data: bytes, message_type: type[M], max_inputs: int = 0) -> M:
    """The message; InvalidRequest if it is none, or has more fields than so many inputs and all else can have."""
    for _ in check_fields(data, message_type, max_inputs):
        pass
    return decode(data, message_type)


class Reader(Generic[M]):
    """Reads messages of a type, small ones into one object."""

    def __init__(self, message_type: type[M]) -> None:
        self.message_type = message_type
        self._message = message_type()
        self._num_bytes = 0  # that it has read: it is cleared before the next one, but keeps its memory

    async def read(self, data: bytes, slicer: Slicer, convert: Callable[[M], T], max_inputs: int) -> T:
        """What `convert`, which must keep no part of it, makes of the message.

        InvalidRequest as with `parse`. An iteration of the event loop decodes or converts one large message: either
        takes it 14 ms where the system has to find the memory first.
        """
        units = len(data) // _BYTES_PER_SLICE_UNIT
        await slicer.turn(units)
        for _ in check_fields(data, self.message_type, max_inputs):
            await slicer.turn(FIELDS_PER_SLICE)
        if len(data) <= _SMALL_BYTES:
            return convert(self._read_small(data))
        message = decode(data, self.message_type)
        await slicer.turn(units)
        return convert(message)

    def _read_small(self, data: bytes) -> M:
        self._num_bytes += len(data)
        if self._num_bytes > _MAX_SHARED_BYTES:
            self._message, self._num_bytes = self.message_type(), len(data)
        try:
            self._message.ParseFromString(data)
        except DecodeError:
            raise _undecodable() from None
        return self._message


def decode(data: bytes, message_type: type[M]) -> M:
    """The message, whose fields have been counted; InvalidRequest if it is none."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        raise _undecodable() from None


def set_fields(message: Message) -> dict[str, Any]:
    """By name. To read a message or list that is not set would make one: a block of memory each."""
    return {field.name: value for field, value in message.ListFields()}


def check_fields(data: bytes, message_type: type[Message], max_inputs: int) -> Iterator[None]:
    """InvalidRequest if a message has more fields than so many inputs and all else can have.

    What this takes depends on the limit, not on the message; it pauses after every FIELDS_PER_SLICE.
    """
    max_fields = _MAX_OTHER_FIELDS + _FIELDS_PER_INPUT * max_inputs
    if len(data) <= max_fields:  # a field takes a byte at least
        return
    try:
        for num_fields in _count_fields(data, _schema(message_type.DESCRIPTOR), max_fields):
            if num_fields > max_fields:
                text = f"the message has more than {max_fields} fields, which is enough for {max_inputs} inputs"
                raise InvalidRequest("requests" if max_inputs else "", text)
            yield
    except IndexError:
        raise _undecodable() from None


def tags(message_type: type[Message]) -> dict[str, bytes]:
    """What precedes the value of each field, by its name."""
    fields = message_type.DESCRIPTOR.fields
    return {field.name: varint(field.number << 3 | _WIRE_TYPES.get(field.type, _VARINT)) for field in fields}


def string(tag: bytes, text: str) -> bytes:
    """A field, unless it has its default, as the next two."""
    return length_delimited(tag, text.encode()) if text else b""


def integer(tag: bytes, value: int) -> bytes:
    return tag + varint(value) if value else b""


def float32(tag: bytes, value: float) -> bytes:
    data = _FLOAT32.pack(value)
    return tag + data if data != _ZERO else b""


def length_delimited(tag: bytes, data: bytes) -> bytes:
    """A field whose content, a message for example, is serialized already."""
    return tag + varint(len(data)) + data


def message_header(tag: bytes, parts: list[bytes]) -> bytes:
    """What precedes a field whose content is concatenated later."""
    return tag + varint(sum(map(len, parts)))


def _undecodable() -> InvalidRequest:
    return InvalidRequest("", "the message cannot be decoded")


def _count_fields(data: bytes, schema: Schema, limit: int) -> Iterator[int]:
    """How many there are so far, after every FIELDS_PER_SLICE and beyond the limit; IndexError if bytes are missing."""
    at, end = 0, len(data)
    num_fields, pause = 0, min(FIELDS_PER_SLICE, limit + 1)
    outer: list[tuple[int, Schema]] = []  # messages that this one is in, each with its end
    while True:
        while at >= end:
            at = end
            if not outer:
                return
            end, schema = outer.pop()
        num_fields += 1
        if num_fields == pause:
            yield num_fields
            pause = min(pause + FIELDS_PER_SLICE, limit + 1)
        tag, at = data[at], at + 1
        if tag >= 0x80:
            tag, at = _read_varint(data, at - 1)
        if tag & 7 != _LENGTH_DELIMITED:
            at = _skip_number(data, at, tag & 7)
            continue
        length, at = data[at], at + 1
        if length >= 0x80:
            length, at = _read_varint(data, at - 1)
        if length and (inner := schema.get(tag >> 3)) is not None:
            outer.append((end, schema))
            end, schema = at + length, inner
        else:
            at += length


def _skip_number(data: bytes, at: int, wire_type: int) -> int:
    """Where it ends; groups, which no message has, are empty."""
    match wire_type:
        case 0:
            return _read_varint(data, at)[1]
        case 1:
            return at + 8
        case 5:
            return at + 4
    return at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for index in range(10):
        value |= (data[at + index] & 0x7F) << 7 * index
        if data[at + index] < 0x80:
            return value, at + index + 1
    raise IndexError


def varint(value: int) -> bytes:
    if value < 0x80:
        return _ONE_BYTE[value]
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


@functools.cache
def _schema(message: Descriptor) -> Schema:
    return {field.number: _schema(field.message_type) for field in message.fields if field.message_type is not None}
