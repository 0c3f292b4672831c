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
from tgis.engines.memory.available import in_words, memory_for_rows, memory_limit
from tgis.engines.memory.fitting import Costs
from tgis.engines.memory.peaks import peak_meter
from tgis.engines.memory.probing import Prober
from tgis.engines.padded.kv_cache import KvCost
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions

log = logging.getLogger(__name__)

_LONG_ROW = 2048  # tokens of the longest row that is computed, or twice as many as a pass takes, if that is more


def padded_memory(
    engine: Engine, options: EngineOptions, device: torch.device, kv: KvCost, held: Callable[[], int]
) -> MemoryModel:
    """Weights in tokens of context, for an engine without rows; StartError where nothing would fit.

    `held` tells the bytes of keys and values at the moment.
    """
    if options.estimate_memory == "manual":
        return declared(options.max_sequence_length, engine.info.max_batch_size, options.batch_safety_margin)
    room = memory_for_rows(options, device)
    power = 2 if engine.info.encoder_decoder else 1  # decoders compute long inputs in pieces, encoders do not
    costs = Costs(0.0)
    if options.estimate_memory == "auto":
        longest = measured_length(engine, options, _LONG_ROW, int(room / kv.token))
        costs = _measured(engine, options, device, held, lambda prober: prober.padded(longest, power))
    reserve, token = costs.reserve + kv.fixed, costs.token + kv.token
    tokens = int((room - reserve) / token)
    text = (
        f"{in_words(room)} are there for batches, BATCH_SAFETY_MARGIN taken off; steps of {engine.info.max_batch_size} "
        f"rows take {in_words(reserve)}, and each token of context {in_words(token)}: room for {max(tokens, 0)} tokens"
    )
    if tokens < 1:
        raise StartError(f"{text}; lower MAX_BATCH_SIZE, choose a smaller DTYPE or grant more memory")
    log.info("%s", text)
    if power == 1:
        return MemoryModel(tokens, prefill_linear=max(1.0, (costs.prefill + kv.token) / token))
    return MemoryModel(tokens, prefill_linear=1.0, prefill_quadratic_1=costs.prefill / token)


def beside_blocks(
    engine: Engine,
    options: EngineOptions,
    device: torch.device,
    measured: int,
    held: Callable[[], int],
    smallest: Callable[[int], int] = int,
) -> int:
    """Bytes that the worst step takes of an engine that has KV blocks for one row of `measured` tokens."""

    def measure(prober: Prober) -> Costs:
        return Costs(prober.chunked(measured, options.max_sequence_length))

    return int(_measured(engine, options, device, held, measure, smallest).reserve)


def measured_length(engine: Engine, options: EngineOptions, enough: int, fitting: int) -> int:
    """Tokens of the longest row that is measured, if so many fit into memory at all."""
    enough = max(enough, 2 * engine.info.prefill_tokens)
    longest = min(options.max_sequence_length, engine.info.positions) - 2
    return max(4, min(enough, longest, fitting // 2))


def declared(length: int, rows: int, margin: int) -> MemoryModel:
    """As TGIS has it for manual: `rows` requests of `length` tokens are all that there is room for.

    The margin counts once, in TGIS twice; and one request of the full length fits whatever the margin is.
    """
    return MemoryModel(max(length, length * rows * (100 - margin) // 100), prefill_quadratic_1=1 / length)


def _measured(
    engine: Engine,
    options: EngineOptions,
    device: torch.device,
    held: Callable[[], int],
    measure: Callable[[Prober], Costs],
    smallest: Callable[[int], int] = int,
) -> Costs:
    """What was measured now or before; nothing where nothing can be. All ranks measure if one of them must."""
    key = measurements.circumstances(engine, options, memory_limit(device))
    kept = measurements.load(options.cache_dir, key)
    if smallest(kept is not None):
        assert kept is not None
        return kept
    try:
        meter = peak_meter(device)
    except OSError as error:
        log.warning("memory cannot be measured here, ESTIMATE_MEMORY is off then: %s", error)
        return Costs(0.0)
    started = time.monotonic()
    log.info("measuring what steps take of memory")
    costs = measure(Prober(engine, meter, held, memory_for_rows(options, device)))
    log.info("measured in %.1f s", time.monotonic() - started)
    measurements.save(options.cache_dir, key, costs)
    return costs
