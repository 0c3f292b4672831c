"""The engines: implementations of `base.Engine`, chosen by name and imported only then."""

import gc
import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from tgis.engines.base import Engine
from tgis.errors import Unsupported
from tgis.ipc.messages import EngineOptions

log = logging.getLogger(__name__)

_ENGINES = {
    "fake": ("tgis.engines.fake", "FakeEngine"),
    "hf_optimum_ort": ("tgis.engines.onnx.engine", "load_engine"),
    "hf_transformers": ("tgis.engines.padded.engine", "PaddedEngine"),
    "tgis_native": ("tgis.engines.paged.engine", "PagedEngine"),
}


def load_engine(options: EngineOptions, on_fatal: Callable[[str], NoReturn]) -> Engine:
    """Load the engine that the options name; `auto` is tgis_native if it can run the model, else hf_transformers.

    `on_fatal` ends this process at once with a reason, from any thread: for an engine that lost one of its ranks.
    """
    if options.num_shards > 1:  # only tgis_native can
        return _import("tgis.engines.distributed.engine").ShardedEngine(options, on_fatal)  # type: ignore[no-any-return]
    if options.engine != "auto":
        return _load(options.engine, options)
    try:
        return _load("tgis_native", options)
    except Unsupported as error:
        log.info("the engine is hf_transformers: %s", error)
        return _load("hf_transformers", options)


def _load(name: str, options: EngineOptions) -> Engine:
    module, factory = _ENGINES[name]
    engine: Engine = getattr(_import(module), factory)(options)
    return engine


def _import(module: str) -> ModuleType:
    """Import without garbage collections, a quarter of the time: nearly all that torch and transformers make stays."""
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()
