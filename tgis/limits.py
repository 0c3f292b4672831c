"""Options become limits: of requests, of the engine process, of the adapter store."""

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from tgis.config import Config
from tgis.errors import OptionError, StartError
from tgis.frontend.admission import Admission, Quota
from tgis.frontend.validation import RequestLimits
from tgis.ipc.lookups import AdapterStoreOptions
from tgis.ipc.messages import EngineOptions
from tgis.models.files import ModelFiles, find_directory, find_model, max_sequence_length, pad_token_id

log = logging.getLogger(__name__)

_SPARE_CALLS = 128  # open calls beyond those that may generate: a full server still answers Tokenize and ModelInfo


def admission(config: Config) -> Admission:
    """What the server takes on at once."""
    max_inputs, max_bytes = config.max_concurrent_requests, config.max_call_memory_mb << 20
    per_client = config.max_concurrent_requests_per_client or max_inputs
    return Admission(
        calls=Quota("open calls", max_inputs + _SPARE_CALLS, per_client + _SPARE_CALLS),
        inputs=Quota("inputs in flight", max_inputs, per_client),
        message_bytes=Quota("bytes of messages in flight", max_bytes, max_bytes // 2),
        by_address=config.limit_by_address,
    )


def request_limits(config: Config, model: ModelFiles) -> RequestLimits:
    """The limits of requests, from the options and the model."""
    model_length = max_sequence_length(model.config)
    length = config.max_sequence_length or model_length
    if length > model_length:
        log.warning("MAX_SEQUENCE_LENGTH %d exceeds the model's %d", length, model_length)
    default = config.default_max_new_tokens or None
    new_tokens = config.max_new_tokens
    if new_tokens >= length and default is not None:  # requests of clients that expect all that fits may ask for more
        new_tokens = length - 1
        log.warning("MAX_NEW_TOKENS %d lowered to %d, below MAX_SEQUENCE_LENGTH", config.max_new_tokens, new_tokens)
    if config.max_input_tokens is not None and config.max_input_tokens >= length:
        raise OptionError(f"MAX_INPUT_TOKENS={config.max_input_tokens} must be below MAX_SEQUENCE_LENGTH, {length}")
    return RequestLimits(
        length,
        new_tokens,
        config.default_include_stop_seqs,
        default,
        max_top_n_tokens=config.max_top_n_tokens,
        max_input_tokens=config.max_input_tokens,
    )


def adapter_store_options(config: Config, limits: RequestLimits) -> AdapterStoreOptions | None:
    """The adapter store and its limits; None where there is none."""
    if config.prefix_store_path is None and not config.lora_modules:
        return None
    max_length = limits.max_sequence_length - 1
    length = config.max_prompt_prefix_length or (limits.max_sequence_length + 1) // 2
    if length > max_length:
        raise OptionError(f"MAX_PROMPT_PREFIX_LENGTH={length} must be at most {max_length}, below MAX_SEQUENCE_LENGTH")
    path = None if config.prefix_store_path is None else str(config.prefix_store_path)
    return AdapterStoreOptions(path, config.prompt_cache_size_mb << 20, length, _lora_modules(config))


def _lora_modules(config: Config) -> dict[str, str]:
    """The directories of the adapters that are loaded at start, by name."""
    found = {}
    for name, given in (config.lora_modules or {}).items():
        path, revision = os.path.expanduser(given), None
        if not os.path.isdir(path):  # REPOSITORY@REVISION, as in TGI
            path, _, revision = path.partition("@")
        try:
            directory = find_directory(path, revision or None, str(config.hub_cache), "adapter_config.json")
        except StartError as error:
            raise StartError(f"LORA_MODULES: {name}: {error}") from error
        found[name] = str(directory.absolute())
    return found


def engine_options(
    config: Config,
    limits: RequestLimits,
    model: ModelFiles,
    eos_ids: Sequence[int],
    config_eos_ids: Sequence[int],
    adapter_store: AdapterStoreOptions | None,
) -> EngineOptions:
    """Fields that are not given here are the options of the same names; the engine process checks their types."""
    given: dict[str, Any] = {
        "model_path": str(model.path),
        "dtype": None if config.dtype == "auto" else config.dtype,
        "eos_ids": eos_ids,
        "config_eos_ids": config_eos_ids,
        "max_sequence_length": limits.max_sequence_length,
        "max_prefill_tokens": config.max_batch_prefill_tokens,
        "compile": config.pt2_compile,
        "strict": config.strict_options,
        "cache_dir": str(config.cache_dir),
        "cuda_memory_fraction": config.cuda_process_memory_fraction,
        "num_shards": config.num_shard,
        "rank": config.node_rank * (config.num_shard // config.nnodes),
        "cluster_secret_path": str(config.cluster_secret_path),
        "shared_memory": None,
        "kv_cache_bytes": config.kv_cache_size_mb << 20 if config.kv_cache_size_mb else None,
        "adapter_store": adapter_store,
        "speculator_path": _speculator_path(config),
    }
    same = {name: getattr(config, name) for name in EngineOptions.__struct_fields__ if name not in given}
    return EngineOptions(**same, **given)


def _speculator_path(config: Config) -> str | None:
    """The directory of the model that drafts tokens. StartError if it is of a kind that cannot."""
    if config.speculator_name is None or config.speculation != "auto":
        return None
    try:
        model = find_model(config.speculator_name, config.speculator_revision, str(config.hub_cache))
    except StartError as error:
        raise StartError(f"SPECULATOR_NAME: {error}") from error
    medusa = [key for key in model.config if key.startswith("medusa")]
    kinds = model.config.get("model_type"), model.config.get("architectures"), medusa
    if found := re.search("eagle|medusa|mtp", str(kinds), re.IGNORECASE):
        raise StartError(f"SPECULATOR_NAME: {model.path} has {found[0]} heads, which are not supported")
    return str(model.path)


def placeholder_id(model: ModelFiles, eos_ids: Sequence[int], vocab_size: int) -> int:
    """The token shown for virtual tokens: the padding token, else an EOS token, else 0."""
    ids = (pad_token_id(model.config), *eos_ids)
    return next((id_ for id_ in ids if id_ is not None and 0 <= id_ < vocab_size), 0)
