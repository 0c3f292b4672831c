"""Checks every adapter of a store, as the server would on loading it, and describes it in a line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterProblem
from tgis.models.files import embedding_size, is_encoder_decoder, max_sequence_length
from tgis.prompts.files import FILES, AdapterDirectory
from tgis.prompts.lora import RawLora
from tgis.prompts.soft_prompt import RawSoftPrompt
from tgis.prompts.store import read_adapter
from tgis.prompts.tensor_file import TargetModel


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One directory of the store; unknown properties are empty."""

    id: str
    layout: str = ""
    shape: str = ""
    dtype: str = ""
    size: int = 0  # bytes in memory
    problem: str = ""


def check_store(
    store: Path, model_config: dict[str, Any] | None, dtype: str, max_length: int | None, limit: int
) -> Iterator[StoreEntry]:
    """Check every directory that may be meant as an adapter, sorted by id; `limit` is the size of a file in bytes.

    Without `model_config` all that depends on the model is accepted; `max_length` defaults to half its length.
    """
    config = model_config or {}
    target = TargetModel(
        embedding_size=embedding_size(config),
        max_length=max_length or (max_sequence_length(config) + 1) // 2,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
        encoder_decoder=is_encoder_decoder(config) if model_config is not None else None,
    )
    root = os.path.realpath(store)
    if any(os.path.lexists(os.path.join(root, name)) for name in FILES):
        yield StoreEntry(".", problem="files directly in the store cannot be named")
    for adapter_id in _ids(root, ""):
        yield _entry(root, adapter_id, target, limit)


def _ids(root: str, parent: str) -> Iterator[str]:
    """Directories that hold files or nothing at all; hidden ones, such as those of Kubernetes volumes, are skipped."""
    for entry in sorted(os.scandir(os.path.join(root, parent)), key=lambda entry: entry.name):
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        here = os.path.join(parent, entry.name)
        names = [name for name in os.listdir(os.path.join(root, here)) if not name.startswith(".")]
        if not names or not all(os.path.isdir(os.path.join(root, here, name)) for name in names):
            yield here
        if not entry.is_symlink():
            yield from _ids(root, here)


def _entry(root: str, adapter_id: str, target: TargetModel, limit: int) -> StoreEntry:
    try:
        raw = read_adapter(AdapterDirectory.resolve(root, adapter_id), limit)
    except AdapterError as error:
        return StoreEntry(adapter_id, problem=_problem(error))
    layout = "LORA" if isinstance(raw, RawLora) else raw.layout
    try:
        size = raw.fit(target, version=0).size
    except AdapterError as error:
        return StoreEntry(adapter_id, layout, problem=_problem(error))
    shape, tensors = _content(raw)
    dtype = "/".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    return StoreEntry(adapter_id, layout, shape, dtype, size)


def _content(raw: RawLora | RawSoftPrompt) -> tuple[str, list[torch.Tensor]]:
    """The ranks, or virtual tokens by width, of the decoder before those of the encoder; and the tensors."""
    if isinstance(raw, RawLora):
        return f"rank {'/'.join(map(str, sorted(raw.ranks)))}", raw.tensors
    tensors = [part.tensor for part in (raw.decoder, raw.encoder) if part is not None]
    return " + ".join("x".join(map(str, tensor.shape)) for tensor in tensors), tensors


def _problem(error: AdapterError) -> str:
    match error.problem:
        case AdapterProblem.NOT_FOUND:
            return "no soft prompt or adapter in it"
        case AdapterProblem.UNSUPPORTED:
            return f"an adapter of type {error}, which is not supported"
    return str(error)
