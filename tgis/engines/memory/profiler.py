"""ESTIMATE_MEMORY: how many tokens of context fit beside the worst step, and what a prefill weighs.

    peak of a step = reserve + (keys and values + token) x tokens of the batch + prefill x tokens of a prefill

auto measures all but the keys and values, which are arithmetic, once for all starts that are alike; manual trusts
the options; off counts the keys and values only.
"""

import logging
import time
from collections.abc import Callable

import torch

from tgis.batcher.memory_model import MemoryModel
from tgis.engines.base import Engine
from tgis.engines.memory import measurements
from tgis.engines.memory.available import format_bytes, memory_for_batches, total_memory
from tgis.engines.memory.fitting import StepCosts
from tgis.engines.memory.peaks import peak_meter
from tgis.engines.memory.probing import DummyRunner
from tgis.engines.padded.kv_cache import KvCacheCost
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions

log = logging.getLogger(__name__)

_MAX_DUMMY_LENGTH = (
    2048  # tokens of the longest row that is computed, or twice as many as a pass takes, if that is more
)


def profile_padded(
    engine: Engine, options: EngineOptions, device: torch.device, kv: KvCacheCost, kv_cache_bytes: Callable[[], int]
) -> MemoryModel:
    """Weights in tokens of context, for an engine without rows; StartError where nothing would fit.

    `held` tells the bytes of keys and values at the moment.
    """
    if options.estimate_memory == "manual":
        return declared_memory(options.max_sequence_length, engine.info.max_batch_size, options.batch_safety_margin)
    room = memory_for_batches(options, device)
    power = 2 if engine.info.encoder_decoder else 1  # decoders compute long inputs in pieces, encoders do not
    costs = StepCosts(0.0)
    if options.estimate_memory == "auto":
        longest = dummy_length(engine, options, _MAX_DUMMY_LENGTH, int(room / kv.bytes_per_token))
        costs = _profile(engine, options, device, kv_cache_bytes, lambda prober: prober.profile_padded(longest, power))
    reserve, token = costs.reserve + kv.fixed_bytes, costs.token + kv.bytes_per_token
    tokens = int((room - reserve) / token)
    text = (
        f"{format_bytes(room)} are there for batches, BATCH_SAFETY_MARGIN taken off; steps of "
        f"{engine.info.max_batch_size} rows take {format_bytes(reserve)}, and each token of context "
        f"{format_bytes(token)}: room for {max(tokens, 0)} tokens"
    )
    if tokens < 1:
        raise StartError(f"{text}; lower MAX_BATCH_SIZE, choose a smaller DTYPE or grant more memory")
    log.info("%s", text)
    if power == 1:
        return MemoryModel(tokens, prefill_linear=max(1.0, (costs.prefill + kv.bytes_per_token) / token))
    return MemoryModel(tokens, prefill_linear=1.0, prefill_quadratic=costs.prefill / token)


def profile_paged(
    engine: Engine,
    options: EngineOptions,
    device: torch.device,
    measured: int,
    kv_cache_bytes: Callable[[], int],
    all_reduce_min: Callable[[int], int] = int,
) -> int:
    """Bytes that the worst step takes of an engine that has KV blocks for one row of `measured` tokens."""

    def measure(prober: DummyRunner) -> StepCosts:
        return StepCosts(prober.profile_paged(measured, options.max_sequence_length))

    return int(_profile(engine, options, device, kv_cache_bytes, measure, all_reduce_min).reserve)


def dummy_length(engine: Engine, options: EngineOptions, enough: int, fitting: int) -> int:
    """Tokens of the longest row that is measured, if so many fit into memory at all."""
    enough = max(enough, 2 * engine.info.max_prefill_tokens)
    longest = min(options.max_sequence_length, engine.info.max_positions) - 2
    return max(4, min(enough, longest, fitting // 2))


def declared_memory(length: int, rows: int, margin: int) -> MemoryModel:
    """As TGIS has it for manual: `rows` requests of `length` tokens are all that there is room for.

    The margin counts once, in TGIS twice; and one request of the full length fits whatever the margin is.
    """
    return MemoryModel(max(length, length * rows * (100 - margin) // 100), prefill_quadratic=1 / length)


def _profile(
    engine: Engine,
    options: EngineOptions,
    device: torch.device,
    kv_cache_bytes: Callable[[], int],
    measure: Callable[[DummyRunner], StepCosts],
    all_reduce_min: Callable[[int], int] = int,
) -> StepCosts:
    """What was measured now or before; nothing where nothing can be. All ranks measure if one of them must."""
    key = measurements.profile_key(engine, options, total_memory(device))
    kept = measurements.load(options.cache_dir, key)
    if all_reduce_min(kept is not None):
        assert kept is not None
        return kept
    try:
        meter = peak_meter(device)
    except OSError as error:
        log.warning("memory cannot be measured here, ESTIMATE_MEMORY is off then: %s", error)
        return StepCosts(0.0)
    started = time.monotonic()
    log.info("measuring what steps take of memory")
    costs = measure(DummyRunner(engine, meter, kv_cache_bytes, memory_for_batches(options, device)))
    log.info("measured in %.1f s", time.monotonic() - started)
    measurements.save(options.cache_dir, key, costs)
    return costs
