"""The adapter store: a directory of adapters for one model, loaded on demand, cached, reloaded when changed."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import torch

from tgis.errors import AdapterError
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.ipc.messages import EngineInfo
from tgis.prompts.files import CONFIG, find_directory
from tgis.prompts.lora import LoraAdapter, read_lora
from tgis.prompts.soft_prompt import SoftPrompt, read_soft_prompt
from tgis.prompts.tensor_file import TargetModel, read_config
from tgis.utils.file_watch import Signature

LoadedAdapter = SoftPrompt | LoraAdapter


class _PeftType(msgspec.Struct):
    peft_type: str


class AdapterCache:
    """Adapters, each valid for one signature of its files. Evicting one does not affect those who already hold it."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is in bytes."""
        self.capacity = capacity
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[Signature, LoadedAdapter]] = {}  # least recently used first

    def get(self, key: str, signature: Signature) -> LoadedAdapter | None:
        """The adapter if it is cached with this signature."""
        with self._lock:
            seen, adapter = self._entries.get(key, (None, None))
            if adapter is None or seen != signature:
                return None
            self._entries[key] = self._entries.pop(key)
            return adapter

    def put(self, key: str, signature: Signature, adapter: LoadedAdapter) -> None:
        """Cache an adapter that takes at most the capacity, in place of an earlier one."""
        with self._lock:
            self._entries.pop(key, None)
            self._entries[key] = signature, adapter
            excess = sum(cached.size for _, cached in self._entries.values()) - self.capacity
            while excess > 0:
                _, evicted = self._entries.pop(next(iter(self._entries)))
                excess -= evicted.size


@dataclass(frozen=True, slots=True)
class StoreResult:
    """An adapter, and whether its files had to be read."""

    adapter: LoadedAdapter
    loaded: bool


class AdapterStore:
    """Thread-safe; threads load in parallel."""

    def __init__(
        self, path: str | None, cache_bytes: int, target: TargetModel, lora_modules: Mapping[str, str] | None = None
    ) -> None:
        self._path = path
        self._lora_modules = lora_modules or {}
        self._target = target
        self._cache = AdapterCache(cache_bytes)

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
        directory = find_directory(self._path, self._lora_modules, adapter_id)
        signature = directory.signature()  # before reading: a change meanwhile is noticed next time
        cached = self._cache.get(directory.path, signature)
        if cached is not None:
            return StoreResult(cached, loaded=False)
        is_lora = directory.has(CONFIG) and read_config(directory, _PeftType).peft_type == "LORA"
        read = read_lora if is_lora else read_soft_prompt
        adapter = read(directory, self._cache.capacity, self._target)
        if adapter.size > self._cache.capacity:
            raise AdapterError(f"it takes {adapter.size} bytes, the cache has {self._cache.capacity}")
        self._cache.put(directory.path, signature, adapter)
        return StoreResult(adapter, loaded=True)
