"""Loads every adapter of a store, as the server would, and describes it in a line."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterProblem
from tgis.models.files import embedding_size, is_encoder_decoder, max_sequence_length
from tgis.prompts.catalog import stored_ids
from tgis.prompts.files import FILES
from tgis.prompts.store import AdapterStore
from tgis.prompts.tensor_file import TargetModel


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One directory of the store; unknown properties are empty."""

    id: str
    kind: str = ""  # LoRA or soft prompt
    rank: int = 0  # of LoRA
    length: int = 0  # virtual tokens
    size: int = 0  # bytes in memory
    problem: str = ""


def check_store(
    store: Path, model_config: dict[str, Any] | None, dtype: str, max_length: int | None, cache_bytes: int
) -> Iterator[StoreEntry]:
    """Check every directory that may be meant as an adapter, sorted by id.

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
    adapters = AdapterStore(root, cache_bytes, target)
    if any(os.path.lexists(os.path.join(root, name)) for name in FILES):
        yield StoreEntry(".", problem="files directly in the store cannot be named")
    for adapter_id in sorted(stored_ids(root)):
        if not _is_parent(os.path.join(root, adapter_id)):
            yield _entry(adapters, adapter_id)


def _is_parent(path: str) -> bool:
    """Whether there are only directories in it, which may be adapters."""
    names = [name for name in os.listdir(path) if not name.startswith(".")]
    return bool(names) and all(os.path.isdir(os.path.join(path, name)) for name in names)


def _entry(store: AdapterStore, adapter_id: str) -> StoreEntry:
    try:
        adapter = store.find(adapter_id).adapter
    except AdapterError as error:
        return StoreEntry(adapter_id, problem=_problem(error))
    kind = "LoRA" if adapter.rank else "soft prompt"
    return StoreEntry(adapter_id, kind, adapter.rank, adapter.length, adapter.size)


def _problem(error: AdapterError) -> str:
    match error.problem:
        case AdapterProblem.NOT_FOUND:
            return "no soft prompt or adapter in it"
        case AdapterProblem.UNSUPPORTED:
            return f"an adapter of type {error}, which is not supported"
    return str(error)
