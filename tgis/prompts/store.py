"""The adapter store: a directory of adapters for one model, loaded on demand, cached, reloaded when changed."""

import itertools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import torch

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterProblem, AdapterStoreOptions
from tgis.ipc.messages import EngineInfo
from tgis.prompts.files import CONFIG, AdapterDirectory
from tgis.prompts.lora import LoraAdapter, RawLora, read_lora
from tgis.prompts.resolver import StoreResult
from tgis.prompts.soft_prompt import RawSoftPrompt, SoftPrompt, read_soft_prompt
from tgis.prompts.tensor_file import TargetModel, read_config
from tgis.utils.file_watch import Signature

LoadedAdapter = SoftPrompt | LoraAdapter
V = TypeVar("V")


class _PeftType(msgspec.Struct):
    peft_type: str


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    signature: Signature
    value: V
    size: int


class AdapterCache(Generic[V]):
    """A value is valid for one signature of its files. Evicting it does not affect those who already hold it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry[V]] = {}  # least recently used first
        self._size = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all values."""
        return self._size

    def get(self, key: str, signature: Signature) -> V | None:
        """The value if it is cached with this signature."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.signature != signature:
                return None
            self._entries[key] = self._entries.pop(key)
            return entry.value

    def put(self, key: str, signature: Signature, value: V, size: int) -> V:
        """Cache a value of `size` bytes; returns the one to use, which is another thread's if that came first."""
        assert size <= self.capacity
        evicted = []  # freed after the lock is released
        with self._lock:
            old = self._entries.get(key)
            if old is not None and old.signature == signature:
                return old.value
            if old is not None:
                evicted.append(self._remove(key))
            while self._size + size > self.capacity:
                evicted.append(self._remove(next(iter(self._entries))))
            self._entries[key] = _Entry(signature, value, size)
            self._size += size
        return value

    def _remove(self, key: str) -> _Entry[V]:
        entry = self._entries.pop(key)
        self._size -= entry.size
        return entry


class AdapterStore:
    """Thread-safe; threads load in parallel."""

    def __init__(
        self, path: str | None, cache_bytes: int, target: TargetModel, lora_modules: Mapping[str, str] | None = None
    ) -> None:
        self._path = None if path is None else os.path.realpath(path)
        self._lora_modules = lora_modules or {}
        self._target = target
        self._cache: AdapterCache[LoadedAdapter] = AdapterCache(cache_bytes)
        self._versions = itertools.count(1)

    @classmethod
    def for_engine(cls, options: AdapterStoreOptions, info: EngineInfo) -> "AdapterStore":
        """The store of `options` for the model of `info`."""
        dtype, device = getattr(torch, info.dtype), torch.device(info.device)
        target = TargetModel(
            info.embedding_size, options.max_soft_prompt_length, dtype, device, info.encoder_decoder, info.lora_targets
        )
        return cls(options.path, options.cache_bytes, target, options.lora_modules)

    def find(self, adapter_id: str) -> StoreResult:
        """The adapter as its files are now; AdapterError if it is missing or unusable."""
        directory = self._directory(adapter_id)
        signature = directory.signature()  # before reading: a change meanwhile is noticed next time
        cached = self._cache.get(directory.path, signature)
        if cached is not None:
            return StoreResult(cached, loaded=False)
        raw = read_adapter(directory, self._cache.capacity)
        adapter = raw.fit(self._target, next(self._versions))
        if adapter.size > self._cache.capacity:
            raise AdapterError(f"it takes {adapter.size} bytes, the cache has {self._cache.capacity}")
        return StoreResult(self._cache.put(directory.path, signature, adapter, adapter.size), loaded=True)

    def _directory(self, adapter_id: str) -> AdapterDirectory:
        if adapter_id in self._lora_modules:
            return AdapterDirectory.trusted(self._lora_modules[adapter_id])
        if self._path is None:
            raise AdapterError("it is no LoRA module, and no adapter store was configured", AdapterProblem.NOT_FOUND)
        return AdapterDirectory.resolve(self._path, adapter_id)


def read_adapter(directory: AdapterDirectory, limit: int) -> RawSoftPrompt | RawLora:
    """The adapter as stored, from files of at most `limit` bytes; AdapterError if it is missing or unusable."""
    if directory.has(CONFIG) and read_config(directory, _PeftType).peft_type == "LORA":
        return read_lora(directory, limit)
    return read_soft_prompt(directory, limit)
