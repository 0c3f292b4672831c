"""What engines need of the header of a GGUF file: `tgis.models.convert.gguf` writes it as JSON, next to the file."""

from pathlib import Path

import msgspec

WEIGHTS, HEADER = "model.gguf", "gguf_header.json"  # names in directories made for GGUF files
BLOCKS = {  # elements of a block, and its bytes
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip


class GgufTensor(msgspec.Struct, frozen=True):
    """The place of a tensor in the file."""

    kind: str  # a key of BLOCKS
    shape: tuple[int, ...]  # dimensions in PyTorch's order
    start: int
    num_bytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    """The tensors by name."""

    architecture: str
    tensors: dict[str, GgufTensor]


def read_header(directory: Path) -> GgufHeader:
    """Read the header of the GGUF file in a directory that is made for it."""
    return msgspec.json.decode((directory / HEADER).read_bytes(), type=GgufHeader)
