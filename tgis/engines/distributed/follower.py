"""Entry point of every rank but the first: loads its shard of the model, then computes every step that rank 0 sends.

Run as `python -m tgis.engines.distributed.follower SOCKET STORE RANK`: two file descriptors and a number. It exits when
told to, when rank 0 is gone (end of file), or on an error, which it reports first.
"""

import gc
import logging
import socket
import sys

import torch.distributed as dist

from tgis.engines.distributed import ranks
from tgis.engines.distributed.mirror import Mirror, StepInput
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.channel import Channel
from tgis.ipc.messages import EngineOptions, Heartbeat, Shutdown
from tgis.utils import logs
from tgis.utils.memory import return_unused_memory

log = logging.getLogger(__name__)


def main() -> int:
    """Follow rank 0 from its first message to its last."""
    sock, store_fd, rank = map(int, sys.argv[1:])
    channel = Channel(socket.socket(fileno=sock), ranks.RankMessage)
    (options,) = channel.receive()
    assert isinstance(options, EngineOptions)
    logs.configure(level=options.log_level, json_output=options.json_output, process=f"rank {rank}")
    channel.start_heartbeat(lambda: Heartbeat(rank, logs.num_dropped_lines(), channel.resident_cache_bytes()))
    try:
        ranks.init_ranks(rank, options.num_shards, store_fd)
        _compute_steps(channel, options)
        dist.destroy_process_group()
    except Exception as error:
        log.exception("rank %d cannot go on", rank)
        channel.abort(f"failed: {type(error).__name__}: {error}")
    return 0


def _compute_steps(channel: Channel, options: EngineOptions) -> None:
    """Compute every step that rank 0 computes, in lockstep with it, until shutdown."""
    engine = PagedEngine(options, ranks.all_reduce_min)
    engine.warm_up()
    channel.resident_cache_bytes = lambda: engine.resident_cache_bytes
    mirror = Mirror(engine.info)
    return_unused_memory()
    gc.freeze()  # the loaded model is never garbage
    while True:
        for message in channel.receive():
            match message:
                case Shutdown():
                    return
                case ranks.ClearCache():
                    engine.clear_cache()
                    return_unused_memory()
                case StepInput():
                    engine.compute_logits(mirror.plan(message))


if __name__ == "__main__":
    sys.exit(main())
