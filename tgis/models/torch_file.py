"""Files of torch.save, untrusted: checked, then read by `torch.load(weights_only=True)`.

That keeps code out, but a file could still take gigabytes with `bytearray(N)`, or years with a key of nested tuples,
whose hash doubles with each level.
"""

import io
import pickletools
import re
import zipfile
from pickle import UnpicklingError
from typing import Any

import torch

MAX_DESCRIPTION_BYTES = 1 << 22  # of names and shapes; an adapter of a thousand matrices has about 1 << 18
_MAX_TUPLE_LENGTH = 100  # the longest are shapes
_MAX_BUILDS = 100  # a state dict has one, for the versions of its modules
_ORDERED_DICT = "collections OrderedDict"
_NUM_ARGUMENTS = {  # of the functions that make dense tensors and what holds them
    _ORDERED_DICT: 0,
    "torch._utils _rebuild_tensor_v2": 6,
    "torch._utils _rebuild_tensor_v3": 7,
    "torch._utils _rebuild_parameter": 3,
}
_OPCODES = re.compile(
    r"PROTO|STOP|MARK|(LONG_)?BIN(PUT|GET)|GLOBAL|BINPERSID|REDUCE|BUILD|TUPLE[123]?|APPENDS?|SETITEMS?"
    r"|EMPTY_(TUPLE|LIST|DICT)|NONE|NEW(TRUE|FALSE)|BININT[12]?|LONG1|BINFLOAT|BINUNICODE"
)


class FileTooLarge(Exception):
    """The file, or something in it, is larger than allowed; the text says what."""


def load_archive(data: bytes, limit: int) -> Any:
    """The content of a file that unpacks to at most `limit` bytes.

    UnpicklingError if it may hold more than dense tensors, FileTooLarge; on hostile bytes it raises anything. torch
    reads a copy of what was checked: in the file itself its reader of archives may find other records than Python's.
    """
    checked = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(checked, "w") as copy:
        folder = check_archive(archive, limit)
        copy.writestr(f"{folder}/version", "3")
        for name in sorted(set(archive.namelist())):
            if name in (f"{folder}/data.pkl", f"{folder}/byteorder") or name.startswith(f"{folder}/data/"):
                copy.writestr(name, archive.read(name))
    checked.seek(0)
    content = torch.load(checked, map_location="cpu", weights_only=True)
    return dict(dict.items(content)) if isinstance(content, dict) else content  # a file may replace a dict's methods


def check_archive(archive: zipfile.ZipFile, limit: int) -> str:
    """The folder of all records; raises as `load_archive` does, before torch allocates anything for a record."""
    size = sum(entry.file_size for entry in archive.infolist())
    if size > limit:
        raise FileTooLarge(f"unpacks to {size} bytes, at most {limit} are allowed")
    folder = archive.namelist()[0].partition("/")[0]
    check_description(archive.getinfo(f"{folder}/data.pkl").file_size)
    _check_pickle(archive.read(f"{folder}/data.pkl"))
    return folder


def check_description(size: int) -> None:
    """FileTooLarge if it has more bytes than are needed: each may be a tensor, or microseconds of work."""
    if size > MAX_DESCRIPTION_BYTES:
        raise FileTooLarge(f"describes its tensors in {size} bytes, at most {MAX_DESCRIPTION_BYTES} are allowed")


def _check_pickle(pickled: bytes) -> None:
    """UnpicklingError if it does what torch.save does not need for dense tensors."""
    stack: list[Any] = []  # tuples and literals; other values as the name of what makes them
    marks: list[int] = []  # heights of the stack
    memo: dict[Any, Any] = {}
    builds = 0
    for opcode, argument, _ in pickletools.genops(pickled):
        builds += opcode.name == "BUILD"
        if not _OPCODES.fullmatch(opcode.name) or builds > _MAX_BUILDS:
            raise UnpicklingError(opcode.name)
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif "PUT" in opcode.name:
            memo[argument] = stack[-1]
        elif "GET" in opcode.name:
            stack.append(memo[argument])
        else:
            operands = _pop(stack, marks, opcode.stack_before)
            _check_operands(opcode.name, operands)
            made = operands[0] if operands else opcode.name if argument is None else argument
            stack += [tuple(operands) if kind is pickletools.pytuple else made for kind in opcode.stack_after]


def _pop(stack: list[Any], marks: list[int], kinds: list[pickletools.StackObject]) -> list[Any]:
    """Remove the operands of these kinds; some are all down to the last mark."""
    if pickletools.markobject in kinds:
        bottom = marks.pop() - kinds.index(pickletools.markobject)
    else:
        bottom = len(stack) - len(kinds)
    operands = stack[bottom:]
    del stack[bottom:]
    return operands


def _check_operands(opcode: str, operands: list[Any]) -> None:
    """UnpicklingError for calls of other functions, for tuples that are hashed, and for large arguments, used often."""
    match opcode, operands:
        case "REDUCE", [str(function), tuple(arguments)]:
            allowed = _NUM_ARGUMENTS.get(function) == len(arguments)
            allowed = allowed and not any(argument in ("EMPTY_LIST", "EMPTY_DICT") for argument in arguments)
        case "REDUCE", _:
            allowed = False
        case "BUILD", [target, _]:
            allowed = target == _ORDERED_DICT
        case "BINPERSID", [(_, _, key, *_)]:  # of a storage
            allowed = isinstance(key, str)
        case "SETITEM" | "SETITEMS", [_, *items]:
            allowed = not any(isinstance(key, tuple) for key in items[::2])
        case "TUPLE", _:
            allowed = len(operands) <= _MAX_TUPLE_LENGTH
        case _:
            allowed = True
    if not allowed:
        raise UnpicklingError(opcode)
