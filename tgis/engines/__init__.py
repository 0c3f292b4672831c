"""The engines: implementations of `base.Engine`, chosen by name and imported only then."""

import gc
import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from tgis.engines.base import Engine, warn
from tgis.errors import StartError, Unsupported
from tgis.ipc.channel import Channel
from tgis.ipc.messages import EngineOptions, Heartbeat

log = logging.getLogger(__name__)

_ENGINES = {
    "fake": ("tgis.engines.fake", "FakeEngine"),
    "hf_optimum_ort": ("tgis.engines.onnx.engine", "load_engine"),
    "hf_transformers": ("tgis.engines.padded.engine", "PaddedEngine"),
    "tgis_native": ("tgis.engines.paged.engine", "PagedEngine"),
}
_FALLBACK = "hf_transformers"


def load_engine(
    options: EngineOptions, on_fatal: Callable[[str], NoReturn], on_heartbeat: Callable[[Heartbeat], None]
) -> tuple[Engine, str]:
    """Load the engine that the options name, or hf_transformers with the reason if that engine cannot run the model.

    An engine with other ranks calls, from any thread, `on_fatal`, which ends this process with a reason, and
    `on_heartbeat` with the heartbeats of these ranks.
    """
    if options.num_shards > 1:
        engine = _import("tgis.engines.distributed.engine").ShardedEngine(options, on_fatal, on_heartbeat)
        reason = engine.reason
    else:
        engine, reason = load_shard(options)
    length, info = options.max_sequence_length, engine.info
    if not info.encoder_decoder and length > info.max_positions:  # those check the positions of each request
        raise StartError(
            f"MAX_SEQUENCE_LENGTH {length} exceeds the {info.max_positions} positions of {info.model_class}"
        )
    if options.kv_cache_dtype == "bfloat16" != info.dtype:
        raise StartError(f"KV_CACHE_DTYPE=bfloat16, but {info.model_class} is in {info.dtype}")
    if options.speculation == "lookup" and not info.proposed_tokens:
        warn(options, "SPECULATION=lookup has no effect: it needs tgis_native on a CPU, and attention in all layers")
    if options.speculator_path and not info.drafted_tokens:
        needs = "tgis_native on a CPU, attention in all layers, and SPECULATION_MAX_TOKENS"
        warn(options, f"SPECULATOR_NAME has no effect: it needs {needs}")
    store = options.adapter_store
    if store and store.path and not info.supports_adapters:
        warn(options, f"PREFIX_STORE_PATH has no effect: {info.model_class} takes no adapters")
    return engine, reason


def load_shard(options: EngineOptions) -> tuple[Engine, str]:
    """This rank's share of the engine, where `load_engine` loads one of several ranks."""
    return _load_or_fall_back(options, _load)


def follow_node_0(parent: Channel, options: EngineOptions) -> None:
    """Be a rank of this node in a cluster, until rank 0 on node 0 ends it."""
    _import("tgis.engines.distributed.follower").follow_node_0(parent, options)


def describe_memory(options: EngineOptions) -> list[str]:
    """Lines that say what a start will need of each rank; none for the engine `fake`. StartError where a start would
    refuse.
    """
    if options.num_shards > 1:
        _import("tgis.engines.distributed.ranks").check_shardable(options)
    if options.engine == "fake":
        return []
    return [*_load_or_fall_back(options, lambda name, options: _import(_ENGINES[name][0]).describe_memory(options))[0]]


def _load_or_fall_back(options: EngineOptions, load: Callable[[str, EngineOptions], Any]) -> tuple[Any, str]:
    """The engine that was asked for, or hf_transformers if that cannot run the model; `auto` asks for tgis_native."""
    name = "tgis_native" if options.engine == "auto" else options.engine
    engine, reason = None, ""
    _check_kv_cache_dtype(options, name)
    try:
        engine = load(name, options)
    except Unsupported as error:
        if name == _FALLBACK:
            raise
        reason = f"not {name}: {error}"
        text = f"the engine is {_FALLBACK}, {reason}"
        if options.engine == "auto":
            log.info(text)
        else:
            warn(options, text)
        name = _FALLBACK
        _check_kv_cache_dtype(options, name, f", {reason}")
    if options.compile and name != "tgis_native":
        warn(options, f"PT2_COMPILE has no effect: the engine {name} does not compile")
    if engine is None:
        gc.collect()  # the model of the other one, whose cycles the next import would freeze
        engine = load(name, options)
    return engine, reason


def _check_kv_cache_dtype(options: EngineOptions, name: str, reason: str = "") -> None:
    if options.kv_cache_dtype == "int8" and name != "tgis_native":
        raise StartError(f"KV_CACHE_DTYPE=int8 works with tgis_native only, not with {name}{reason}")


def _load(name: str, options: EngineOptions) -> Engine:
    module, factory = _ENGINES[name]
    return getattr(_import(module), factory)(options)


def _import(module: str) -> ModuleType:
    """Import with garbage collection off, which saves a quarter of the time: nearly all objects of torch stay."""
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        gc.enable()
