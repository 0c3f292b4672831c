"""Soft prompts and LoRA adapters on disk: found, checked, loaded and cached. Only `open_store` imports torch."""

from importlib import import_module

from tgis.ipc.adapters import AdapterStoreOptions
from tgis.ipc.messages import EngineInfo
from tgis.prompts.resolver import Store


def open_store(options: AdapterStoreOptions, info: EngineInfo) -> Store:
    """The store of adapters for the model that `info` describes."""
    store: Store = import_module("tgis.prompts.store").AdapterStore.for_engine(options, info)
    return store
