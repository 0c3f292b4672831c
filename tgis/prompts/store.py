"""The adapters of one directory, for one model: found by id, loaded when first asked for or changed, cached."""

import itertools
import os

import torch

from tgis.errors import PromptError
from tgis.ipc.adapters import PromptOptions, PromptProblem
from tgis.ipc.messages import EngineInfo
from tgis.prompts.cache import PromptCache
from tgis.prompts.files import PromptDirectory
from tgis.prompts.loader import Adapter, fit_adapter, read_adapter
from tgis.prompts.resolver import Found
from tgis.prompts.tensor_file import Target


class PromptStore:
    """Safe for several threads, which load at the same time."""

    def __init__(self, path: str, cache_bytes: int, target: Target) -> None:
        self._path = os.path.realpath(path)
        self._target = target
        self._cache: PromptCache[Adapter] = PromptCache(cache_bytes)
        self._versions = itertools.count(1)

    @classmethod
    def for_engine(cls, options: PromptOptions, info: EngineInfo) -> "PromptStore":
        """The store of `options`, with adapters for the model of `info`."""
        dtype, device = getattr(torch, info.dtype), torch.device(info.device)
        target = Target(info.embedding_size, options.max_length, dtype, device, info.encoder_decoder, info.linears)
        return cls(options.store, options.cache_bytes, target)

    def find(self, prompt_id: str) -> Found:
        """The adapter as its files are now; PromptError if there is none, or none that can be used."""
        directory = PromptDirectory.of(self._path, prompt_id)
        signature = directory.signature()  # before they are read: a swap meanwhile is seen the next time
        cached = self._cache.get(directory.path, signature)
        if cached is not None:
            return Found(cached, loaded=False)
        found = read_adapter(directory, self._cache.capacity)
        adapter = fit_adapter(found, self._target, next(self._versions))
        if adapter.size > self._cache.capacity:
            text = f"it takes {adapter.size} bytes, the cache has {self._cache.capacity}"
            raise PromptError(PromptProblem.BROKEN, text)
        return Found(self._cache.put(directory.path, signature, adapter, adapter.size), loaded=True)
