"""Reads the header of a GGUF file: the numbers and texts of its metadata, and where its tensors are.

The file is not trusted: counts, lengths, types and offsets are bounded and checked before anything is made of them.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tgis.errors import StartError

WEIGHTS = "model.gguf"  # in directories that are made for GGUF files
MAX_ENTRIES = 1 << 16  # of the metadata, and tensors; models of 100 layers have about a thousand
MAX_ELEMENTS = 1 << 21  # in arrays, all together; vocabularies of 262,144 tokens have 1.3 million with their merges
MAX_NAME_BYTES, MAX_TEXT_BYTES = 1 << 8, 1 << 20
_TYPES = (  # by number, as in ggml.h
    "F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32",
    "I64", "F64", "IQ1_M", "BF16",
)  # fmt: skip
BLOCKS = {  # numbers of a block, and its bytes
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENTS = frozenset(1 << bits for bits in range(3, 17))


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """What a header says of a tensor."""

    kind: str  # a key of BLOCKS
    shape: tuple[int, ...]  # as PyTorch has it
    start: int  # in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata without its arrays, and the tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    architecture: str


def read_header(file: Path) -> GgufHeader:
    """StartError if the file is broken, or holds tensors of a type that is not supported."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError) as error:  # ValueError: ours, or that of a file without bytes
        raise StartError(f"{file} is no GGUF file that can be read: {error}") from error


class _Reader:
    """A place in the header of a file; ValueError for what is wrong."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._elements = data, 0, 0

    def header(self) -> GgufHeader:
        magic, version, num_tensors, num_entries = self._numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it does not begin as versions 2 and 3 do, perhaps it is a git-lfs pointer")
        if max(num_tensors, num_entries) > MAX_ENTRIES:
            raise ValueError(f"it has {num_entries} entries and {num_tensors} tensors, at most {MAX_ENTRIES} may be")
        metadata = {self._text(MAX_NAME_BYTES): self._value() for _ in range(num_entries)}
        infos = {self._text(MAX_NAME_BYTES): self._tensor() for _ in range(num_tensors)}
        if len(metadata) < num_entries or len(infos) < num_tensors:
            raise ValueError("it has two entries or tensors of the same name")
        architecture, parts = metadata.get("general.architecture"), metadata.get("split.count", 0)
        if not isinstance(architecture, str) or parts not in (0, 1):
            raise ValueError(f"general.architecture is {architecture!r:.40}, split.count {parts!r:.40}")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in _ALIGNMENTS:
            raise ValueError(f"general.alignment is {alignment!r:.40}")
        begin = -(-self._at // alignment) * alignment
        tensors = {name: self._placed(name, *info, begin, alignment) for name, info in infos.items()}
        return GgufHeader(metadata, tensors, architecture)

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise ValueError("it ends within its header, perhaps it is half a download")
        self._at += size
        return self._data[self._at - size : self._at]

    def _numbers(self, codes: str) -> Any:
        return struct.unpack(f"<{codes}", self._take(struct.calcsize(f"<{codes}")))

    def _text(self, limit: int) -> str:
        (size,) = self._numbers("Q")
        if size > limit:
            raise ValueError(f"it has a name or text of {size} bytes, at most {limit} may be")
        return self._take(size).decode("utf-8", "replace")

    def _value(self) -> Any:
        """The value of an entry; None for arrays."""
        (kind,) = self._numbers("I")
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self._text(MAX_TEXT_BYTES)
        kind, count = self._numbers("IQ") if kind == _ARRAY else (kind, 0)
        self._elements += count
        if self._elements > MAX_ELEMENTS or kind not in (*_NUMBERS, _STRING):
            raise ValueError(f"it has {self._elements} values in arrays, at most {MAX_ELEMENTS} may be; type {kind}")
        if kind in _NUMBERS:
            self._take(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        for _ in range(count if kind == _STRING else 0):
            self._text(MAX_TEXT_BYTES)
        return None

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Shape, number of the type and offset."""
        (dimensions,) = self._numbers("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"it has a tensor of {dimensions} dimensions")
        *shape, number, offset = self._numbers(f"{dimensions}QIQ")
        return tuple(shape[::-1]), number, offset

    def _placed(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, begin: int, alignment: int
    ) -> GgufTensor:
        kind = _TYPES[number] if number < len(_TYPES) else f"number {number}"
        if kind not in BLOCKS:
            raise ValueError(f"{name!r:.80} has type {kind}, only {', '.join(BLOCKS)} are supported")
        numbers, size = BLOCKS[kind]
        num_bytes = prod(shape) // numbers * size
        if 0 in shape or shape[-1] % numbers or offset % alignment or begin + offset + num_bytes > len(self._data):
            raise ValueError(f"{name!r:.80}, {[*shape]} of type {kind} at {offset}, is not whole in this file")
        return GgufTensor(kind, shape, begin + offset, num_bytes)
