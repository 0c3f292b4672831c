"""Reads what torch.save writes, untrusted: tensors in dicts, lists and tuples, and nothing else.

Not torch.load: `weights_only` keeps code out, but a file may still take gigabytes with `bytearray(N)`, or years with a
key of nested tuples, whose hash doubles with each level.
"""

import io
import pickletools
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tgis.errors import AdapterError

MAX_DESCRIPTION_BYTES = 1 << 22  # of names and shapes; an adapter of a thousand matrices has about 1 << 18
_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_NOT_DENSE = {
    "torch.serialization _get_layout": "sparse",  # called before _rebuild_sparse_tensor
    "torch._utils _rebuild_meta_tensor_no_storage": "meta",
    "torch._utils _rebuild_qtensor": "quantized",
    "torch._utils _rebuild_nested_tensor": "nested",
    "torch._utils _rebuild_tensor_v3": "of another dtype",
}
_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE")
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class NotTensorsError(Exception):
    """The file asks for something that tensors do not need."""


@dataclass(frozen=True, slots=True)
class _Global:
    """A function or class that the file names."""

    name: str  # module and name, with a space between


def load_torch_file(name: str, data: bytes, limit: int) -> Any:
    """The content of a file that unpacks to at most `limit` bytes; on hostile bytes it raises anything."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if size > limit:
            raise AdapterError(f"{name} unpacks to {size} bytes, at most {limit} are allowed")
        return _Interpreter(name, archive).run()


def check_description(name: str, size: int) -> None:
    """AdapterError if it has more bytes than are needed: each may be a tensor, or a microsecond of the interpreter."""
    if size > MAX_DESCRIPTION_BYTES:
        raise AdapterError(f"{name} describes its tensors in {size} bytes, at most {MAX_DESCRIPTION_BYTES} are allowed")


class _Interpreter:
    """Executes the few opcodes of pickle that torch.save writes."""

    def __init__(self, name: str, archive: zipfile.ZipFile) -> None:
        self._name = name
        self._archive = archive
        self._folder = archive.namelist()[0].partition("/")[0]
        named = f"{self._folder}/byteorder" in archive.namelist()  # else the file is of an older version
        self._byteorder = self._read("byteorder").decode() if named else "little"
        self._stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, torch.Tensor] = {}  # by key
        self._opcodes: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "STOP": lambda _: None,
            "MARK": lambda _: self._marks.append(len(self._stack)),
            "BINPUT": self._put,
            "LONG_BINPUT": self._put,
            "BINGET": lambda index: self._stack.append(self._memo[index]),
            "LONG_BINGET": lambda index: self._stack.append(self._memo[index]),
            "GLOBAL": lambda name: self._stack.append(_Global(name)),
            "BINPERSID": lambda _: self._stack.append(self._storage(*self._stack.pop())),
            "TUPLE": lambda _: self._stack.append(tuple(self._pop_to_mark())),
            "APPEND": lambda _: self._extend(self._pop(1)),
            "APPENDS": lambda _: self._extend(self._pop_to_mark()),
            "SETITEM": lambda _: self._update(self._pop(2)),
            "SETITEMS": lambda _: self._update(self._pop_to_mark()),
            "REDUCE": lambda _: self._stack.append(self._call(*self._pop(2))),
            "BUILD": lambda _: self._build(*self._pop(1)),
        }

    def run(self) -> Any:
        size = self._archive.getinfo(f"{self._folder}/data.pkl").file_size
        check_description(self._name, size)
        for opcode, argument, _ in pickletools.genops(self._read("data.pkl")):
            self._execute(opcode.name, argument)
        (content,) = self._stack
        return content

    def _read(self, record: str) -> bytes:
        return self._archive.read(f"{self._folder}/{record}")

    def _execute(self, opcode: str, argument: Any) -> None:
        if opcode in _LITERALS:
            self._stack.append(argument)
        elif opcode in _NEW:
            self._stack.append(_NEW[opcode]())
        elif opcode in _TUPLES:
            self._stack.append(tuple(self._pop(_TUPLES[opcode])))
        elif opcode in self._opcodes:
            self._opcodes[opcode](argument)
        else:
            raise NotTensorsError(opcode)

    def _pop(self, count: int) -> list[Any]:
        return self._pop_from(len(self._stack) - count)

    def _pop_to_mark(self) -> list[Any]:
        return self._pop_from(self._marks.pop())

    def _pop_from(self, height: int) -> list[Any]:
        items = self._stack[height:]
        del self._stack[height:]
        return items

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _extend(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise NotTensorsError("an item of no list")
        self._stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        """Hashing nested tuples could take for ever."""
        keys, values = items[::2], items[1::2]
        if type(self._stack[-1]) is not dict or not all(type(key) in (str, int) for key in keys):
            raise NotTensorsError("a key that is no name")
        self._stack[-1].update(zip(keys, values, strict=True))

    def _build(self, _attributes: Any) -> None:
        """The `_metadata` of a state dict, for example."""
        if type(self._stack[-1]) is not dict:
            raise NotTensorsError("attributes")

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        match function:
            case _Global("collections OrderedDict") if not arguments:
                return {}
            case _Global("torch._utils _rebuild_tensor_v2"):
                return self._tensor(*arguments)
            case _Global("torch._utils _rebuild_parameter" | "torch._utils _rebuild_parameter_with_state"):
                return arguments[0]
            case _Global(name) if name in _NOT_DENSE:
                raise AdapterError(f"{self._name} holds a tensor that is no dense one of floats ({_NOT_DENSE[name]})")
        raise NotTensorsError("a call")

    def _tensor(
        self, storage: torch.Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
    ) -> torch.Tensor:
        tensor = storage.as_strided(size, stride, offset)  # checks the bounds
        if tensor.numel() > storage.numel():  # an expanded view, which may claim any size
            raise AdapterError(f"{self._name} holds a tensor that is larger than what is stored of it")
        return tensor

    def _storage(self, _kind: str, storage_type: _Global, key: str, _location: str, numel: int) -> torch.Tensor:
        """All elements of a storage; ValueError unless the file has exactly these."""
        dtype = _DTYPES[storage_type.name.removeprefix("torch ")]
        if key not in self._storages:
            data = bytearray(self._read(f"data/{key}"))
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            if self._byteorder != sys.byteorder:
                self._storages[key].untyped_storage().byteswap(dtype)
        storage = self._storages[key]
        if (storage.dtype, storage.numel()) != (dtype, numel):
            raise ValueError(f"storage {key} has another size")
        return storage
