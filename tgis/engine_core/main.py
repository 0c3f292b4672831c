"""Main of the engine process: load the engine that the first message names, and serve or follow rank 0.

Run as `python -m tgis.engine_core.main FD` with one end of a socketpair. It exits when told to, when its front end is
gone (end of file), or when it cannot go on, and then says why first. It ignores SIGINT and SIGTERM: the front end
handles them.
"""

import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits, check_max_sequence_length
from tgis.engine_core.core import EngineCore
from tgis.engine_core.lookups import LookupTable
from tgis.engines import follow_node_0, load_engine
from tgis.errors import TgisError
from tgis.ipc.channel import Channel
from tgis.ipc.lookups import Acquire, GrammarSpec, Vocabulary
from tgis.ipc.messages import EngineInfo, EngineOptions, Fatal, Heartbeat, Ready, ToEngine
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import TokenTable, low_priority_pool
from tgis.utils import logs
from tgis.utils.memory import return_unused_memory

log = logging.getLogger(__name__)

_ADAPTER_THREADS = 4  # several, so that one slow file does not delay all lookups


def batch_limits(options: EngineOptions, info: EngineInfo) -> BatchLimits:
    """The limits of the batches of this engine."""
    return BatchLimits(
        max_batch_size=info.max_batch_size,
        token_capacity=info.token_capacity,
        prefill_tokens=min(options.max_prefill_tokens or info.max_prefill_tokens, info.max_prefill_tokens),
        max_prefill_padding=options.max_prefill_padding,
        padded=info.padded,
        block_size=info.block_size,
        prefix_cache=options.prefix_cache,
        lookahead=info.lookahead,
        max_prefill_gap_ms=options.max_prefill_gap_ms or info.max_prefill_gap_ms,
        max_waiting_tokens=options.max_waiting_tokens,
        encoder_decoder=info.encoder_decoder and info.block_size > 0,
        proposed_tokens=info.proposed_tokens,
        drafted_tokens=info.drafted_tokens,
        max_drafting=options.speculator_max_batch_size or info.max_batch_size,
        state_slots=info.state_slots,
        vocab_size=info.vocab_size,
    )


def _serve(channel: Channel, options: EngineOptions, received: list[ToEngine]) -> None:
    """Load the engine and serve; `received` are the messages after the options, the vocabulary or none yet."""
    engine, fallback_reason = load_engine(options, channel.abort, channel.send)
    engine.warm_up()
    limits = batch_limits(options, engine.info)
    largest_request = min(engine.info.max_request_tokens, engine.info.token_capacity)
    check_max_sequence_length(largest_request, options.max_sequence_length)
    batcher = Batcher(limits, options.eos_ids)
    channel.resident_cache_bytes = partial(_resident_cache_bytes, engine.info, batcher)
    lookups = LookupTable(channel.send)
    if options.adapter_store and engine.info.supports_adapters:
        from tgis.prompts.store import AdapterStore  # noqa: PLC0415 - needs torch, which the engine `fake` does without

        store = AdapterStore.for_engine(options.adapter_store, engine.info)
        lookups.finders[str] = ThreadPoolExecutor(_ADAPTER_THREADS, "adapters"), store.find
    if table := _token_table((received or channel.receive()).pop(), engine.info, options.eos_ids):
        lookups.finders[GrammarSpec] = low_priority_pool("grammars"), partial(compile_grammar, table=table)
    return_unused_memory()
    gc.freeze()  # the collector need not look at what has been loaded
    channel.handle_inline(Acquire, lookups.acquire)
    channel.send(Ready(engine.info, fallback_reason))
    EngineCore(channel, engine, batcher, lookups, options.kv_cache_idle_seconds).run()
    lookups.close()
    engine.close()


def _token_table(vocabulary: ToEngine, info: EngineInfo, eos_ids: Sequence[int]) -> TokenTable | None:
    """The tokens for grammars, if the model can have any."""
    assert isinstance(vocabulary, Vocabulary)
    if not vocabulary.tokens or not info.has_end(eos_ids):
        return None
    return TokenTable(vocabulary, info.vocab_size, eos_ids, info.forced_bos_token_id)


def _resident_cache_bytes(info: EngineInfo, batcher: Batcher) -> int:
    """Bytes of the KV cache of all ranks that take memory: on CPUs those of blocks that have been used."""
    return int(info.kv_cache_bytes * (batcher.touched_share if info.device == "cpu" else 1))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), ToEngine)
    options, *received = channel.receive()
    assert isinstance(options, EngineOptions)
    logs.configure(level=options.log_level, json_output=options.json_output, process="engine")
    channel.start_heartbeat(lambda: Heartbeat(0, logs.num_dropped_lines(), channel.resident_cache_bytes()))
    try:
        if options.rank:
            follow_node_0(channel, options)
        else:
            _serve(channel, options, received)
    except TgisError as error:
        channel.send(Fatal(str(error)))
        return 1
    except Exception as error:
        log.exception("the engine process cannot go on")
        channel.send(Fatal(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
