"""What is in a store of soft prompts and adapters, one line for each directory: for people, not for serving."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tgis.errors import AdapterError
from tgis.ipc.adapters import AdapterProblem
from tgis.prompts.files import FILES, AdapterDirectory
from tgis.prompts.loader import fit_adapter, read_adapter
from tgis.prompts.lora import RawLora
from tgis.prompts.tensor_file import FileTensor, RawSoftPrompt, TargetModel


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One prompt or adapter, or what stands in its place; empty where something is not known."""

    id: str
    layout: str = ""
    tokens: str = ""  # virtual ones
    rank: str = ""  # of a LoRA adapter
    width: str = ""
    dtype: str = ""
    size: int = 0  # bytes in memory
    problem: str = ""


def check_store(store: str, target: TargetModel, limit: int) -> Iterator[StoreEntry]:
    """Look at every directory of the store whose files can be meant for a prompt, in the order of ids.

    `limit` is the size of a file in bytes.
    """
    root = os.path.realpath(store)
    if any(os.path.lexists(os.path.join(root, name)) for name in FILES):
        yield StoreEntry(".", problem="files directly in the store cannot be named")
    for prompt_id in _ids(root, ""):
        yield _entry(root, prompt_id, target, limit)


def _ids(root: str, above: str) -> Iterator[str]:
    """Directories with files, or with nothing at all; hidden ones are somebody else's, as those of Kubernetes."""
    for entry in sorted(os.scandir(os.path.join(root, above)), key=lambda entry: entry.name):
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        here = os.path.join(above, entry.name)
        names = [name for name in os.listdir(os.path.join(root, here)) if not name.startswith(".")]
        if not names or not all(os.path.isdir(os.path.join(root, here, name)) for name in names):
            yield here
        if not entry.is_symlink():
            yield from _ids(root, here)


def _entry(root: str, adapter_id: str, target: TargetModel, limit: int) -> StoreEntry:
    try:
        found = read_adapter(AdapterDirectory.resolve(root, adapter_id), limit)
    except AdapterError as error:
        return StoreEntry(adapter_id, problem=_problem(error))
    layout = "LORA" if isinstance(found, RawLora) else found.layout
    try:
        size = fit_adapter(found, target, version=0).size
    except AdapterError as error:
        return StoreEntry(adapter_id, layout, problem=_problem(error))
    if isinstance(found, RawLora):
        ranks = "/".join(map(str, sorted(found.ranks)))
        return StoreEntry(adapter_id, layout, rank=ranks, dtype=_dtypes(found.tensors), size=size)
    tensors = [part.tensor for part in (found.decoder, found.encoder) if part is not None]
    widths = "/".join(sorted({str(tensor.shape[1]) for tensor in tensors}))
    return StoreEntry(adapter_id, layout, _tokens(found), width=widths, dtype=_dtypes(tensors), size=size)


def _problem(error: AdapterError) -> str:
    match error.problem:
        case AdapterProblem.NOT_FOUND:
            return "no soft prompt or adapter in it"
        case AdapterProblem.UNSUPPORTED:
            return f"an adapter of type {error}, which is not supported"
    return str(error)


def _tokens(parts: RawSoftPrompt) -> str:
    """The number of the decoder's, and apart from it of an encoder's."""
    texts = [_length(parts.decoder), _length(parts.encoder) and f"{_length(parts.encoder)} encoder"]
    return " + ".join(text for text in texts if text)


def _length(part: FileTensor | None) -> str:
    return str(len(part.tensor)) if part else ""


def _dtypes(tensors: list[torch.Tensor]) -> str:
    return "/".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
