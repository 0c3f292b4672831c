"""Random messages, valid on the wire and mostly out of bounds, and their bytes corrupted as by broken clients."""

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

TEXTS = ["", "a", "The Queen", "\n", " ", "\0", "é👩🏾‍🚀", "e\u0301" * 40, "</s>", "a</s>b", "\ufffd\ufeff\u202e"]
LONG_TEXTS = ["x" * 300, "—" * 2000, "a b" * 20_000]
WHOLE = [0, 0, 1, 1, 2, 3, 5, 8, 20, 64, 65, 128, 2**31 - 1, 2**31, 2**32 - 1]
FLOATS = [0.0, 0.0, 1.0, 1.0, 0.5, 0.05, 0.9, 1.5, 10.0, 1e-9, -1.0, 1e38, -1e38, 1e-45]
ODD_FLOATS = [float("nan"), float("inf"), float("-inf")]
_VALUES: dict[int, Callable[[random.Random], object]] = {
    FieldDescriptor.TYPE_STRING: lambda draw: draw.choice(TEXTS if draw.random() < 0.95 else LONG_TEXTS),
    FieldDescriptor.TYPE_BOOL: lambda draw: draw.random() < 0.5,
    FieldDescriptor.TYPE_UINT32: lambda draw: draw.choice(WHOLE),
    FieldDescriptor.TYPE_UINT64: lambda draw: draw.choice([*WHOLE, 2**63, 2**64 - 1]),
    FieldDescriptor.TYPE_ENUM: lambda draw: draw.choice([0, 1, 1, 2, 77, -1]),
    FieldDescriptor.TYPE_FLOAT: lambda draw: draw.choice(FLOATS if draw.random() < 0.95 else ODD_FLOATS),
}


def random_message(kind: type[Message], draw: random.Random) -> Message:
    """A message with a random subset of its fields set."""
    message = kind()
    _fill(message, draw, density=draw.choice([0.1, 0.2, 0.6]))
    return message


def _fill(message: Message, draw: random.Random, density: float) -> None:
    for field in message.DESCRIPTOR.fields:
        inputs = field.name in ("requests", "request", "text")
        if draw.random() > (0.95 if inputs else density):
            continue
        if isinstance(field.default_value, list):  # repeated, in every version of protobuf
            for _ in range(draw.choice([0, 1, 1, 1, 2, 3, 7])):
                _append(message, field, draw, density)
        elif field.message_type:
            getattr(message, field.name).SetInParent()
            _fill(getattr(message, field.name), draw, density)
        else:
            setattr(message, field.name, _VALUES[field.type](draw))


def _append(message: Message, field: Any, draw: random.Random, density: float) -> None:
    if field.message_type and field.message_type.GetOptions().map_entry:
        key, value = (_VALUES[each.type](draw) for each in field.message_type.fields)
        getattr(message, field.name)[key] = value
    elif field.message_type:
        _fill(getattr(message, field.name).add(), draw, density)
    else:
        getattr(message, field.name).append(_VALUES[field.type](draw))


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with a few replaced, deleted, duplicated or inserted."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(changed))
        end = at + draw.randint(0, 8)
        match draw.randrange(4):
            case 0:
                changed[at:end] = draw.randbytes(end - at)
            case 1:
                del changed[at:end]
            case 2:
                changed[at:at] = changed[at:end]
            case 3:
                changed[at:at] = draw.randbytes(end - at)
    return bytes(changed)
