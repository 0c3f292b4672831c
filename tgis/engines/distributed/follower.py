"""Every rank but the first: loads its shard of the model, then computes every step that rank 0 sends.

On the machine of rank 0 it runs as `python -m tgis.engines.distributed.follower SOCKET STORE`: a file descriptor and
the name of a store. On other nodes it is the engine process and connects to rank 0. It exits on shutdown, when rank 0
or its parent is gone, or after reporting an error.
"""

import gc
import logging
import socket
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from tgis.engines import load_shard
from tgis.engines.base import Engine
from tgis.engines.distributed import ranks
from tgis.engines.distributed.mirror import MirroredSequences, StepInput
from tgis.engines.distributed.rendezvous import address_of, join
from tgis.errors import TgisError
from tgis.ipc.channel import Channel
from tgis.ipc.messages import EngineInfo, EngineOptions, Fatal, Heartbeat, Ready, Shutdown
from tgis.utils import logs
from tgis.utils.memory import return_unused_memory

log = logging.getLogger(__name__)

# Before a failed collective is reported: if its cause is a dead rank, that ends all ranks first, with a better reason.
_CRASH_SECONDS = 1.0


def main() -> int:
    """Follow the rank 0 that has started this process."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])), ranks.RankMessage)
    (options,) = channel.receive()
    assert isinstance(options, EngineOptions)
    logs.configure(level=options.log_level, json_output=options.json_output, process=f"rank {options.rank}")
    _follow(channel, options, sys.argv[2], channel.abort)
    return 0


def follow_node_0(parent: Channel, options: EngineOptions) -> None:
    """Follow the rank 0 of another machine. Errors go to rank 0 and to `parent`, the front end of this node."""
    link, store = join(options)
    ranks.use_interface(options.cluster_interface, address_of(link.getsockname()))
    origin = f"rank 0 of the engine on node 0 at {address_of(link.getpeername())}"
    rank_0 = Channel(link, ranks.RankMessage, lambda reason: parent.abort(f"{origin} is gone: {reason}"))
    rank_0.handle_inline(Fatal, lambda fatal: parent.abort(fatal.message))

    def fail(reason: str) -> None:
        rank_0.send(Fatal(reason))
        parent.abort(f"rank {options.rank} of the engine {reason}")

    _follow(rank_0, options, store, fail, lambda info: parent.send(Ready(info)))


def _follow(
    rank_0: Channel,
    options: EngineOptions,
    store: str,
    fail: Callable[[str], object],
    on_ready: Callable[[EngineInfo], object] = lambda _: None,
) -> None:
    """Load this rank's shard and compute every step in lockstep with rank 0 until shutdown; `fail` is called with an
    error.
    """
    try:
        rank_0.start_heartbeat(lambda: Heartbeat(options.rank, logs.num_dropped_lines()))
        num_shards = options.num_shards
        ranks.init_ranks(options.rank, num_shards, ranks.open_store(store, num_shards), options.ranks_per_node)
        engine, _ = load_shard(options)
        engine.warm_up()
        return_unused_memory()
        gc.freeze()  # the loaded model is never garbage
        on_ready(engine.info)
        _compute_steps(rank_0, engine)
        rank_0.on_end = lambda _: None
        dist.destroy_process_group()
    except Exception as error:  # the main function of a process: rank 0 reports what ends it
        log.exception("rank %d failed", options.rank)
        reason = str(error)
        if not isinstance(error, TgisError):
            reason = f"{type(error).__name__}: {error}"
            time.sleep(_CRASH_SECONDS)
        fail(f"failed: {reason}")


def _compute_steps(rank_0: Channel, engine: Engine) -> None:
    """Compute steps until shutdown. A failed step is given up if rank 0 has also failed in it; otherwise the error is
    raised, because other ranks would wait for this one.
    """
    seqs = MirroredSequences(torch.device(engine.info.device))
    failure: Exception | None = None
    while True:
        for message in rank_0.receive(timeout=_CRASH_SECONDS if failure else None) or [None]:
            if failure and not isinstance(message, ranks.GiveUp):
                raise failure
            match message:
                case Shutdown():
                    return
                case ranks.ClearCache():
                    engine.release(seqs.pop())
                    engine.clear_cache()
                    return_unused_memory()
                case ranks.GiveUp():
                    failure = None
                    engine.discard_step()
                    ranks.finish_collectives()
                    rank_0.send(message)
                case StepInput():
                    engine.release(seqs.pop(message.released))
                    try:
                        engine.step(seqs.plan(message))
                    except Exception as error:  # noqa: BLE001 - the border of a step: raised unless rank 0 gives up
                        failure = error


if __name__ == "__main__":
    sys.exit(main())
