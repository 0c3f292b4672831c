"""Main of a rank that is not the first: load a share of the model, then compute every pass that rank 0 tells.

Run as `python -m tgis.engines.distributed.follower SOCKET STORE RANK`: two file descriptors and a number.
It leaves when told to, when rank 0 is gone (end of file), or when it cannot go on, and then says why first.
"""

import gc
import logging
import socket
import sys

import torch
import torch.distributed as dist

from tgis.engines.distributed import ranks
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.channel import Channel
from tgis.ipc.messages import EngineOptions, Shutdown
from tgis.utils import logs

log = logging.getLogger(__name__)


def main() -> int:
    """Follow rank 0 from its first message to its last."""
    sock, store, rank = map(int, sys.argv[1:])
    link = Channel(socket.socket(fileno=sock), ranks.RankMessage)
    (options,) = link.receive(wait=True)
    assert isinstance(options, EngineOptions)
    logs.configure(level=options.log_level, json_output=options.json_output, process=f"rank {rank}")
    try:
        ranks.init_ranks(rank, options.num_shards, store)
        _compute_steps(link, options)
        dist.destroy_process_group()
    except Exception as error:
        log.exception("rank %d cannot go on", rank)
        link.abort(f"failed: {type(error).__name__}: {error}")
    return 0


def _compute_steps(link: Channel, options: EngineOptions) -> None:
    """Do what rank 0 does, at the same time, until told to leave."""
    engine = PagedEngine(options, ranks.all_reduce_min)
    engine.warm_up()
    dtype = getattr(torch, engine.info.dtype)
    gc.freeze()  # what has been loaded stays
    while True:
        for message in link.receive(wait=True):
            if isinstance(message, Shutdown):
                return
            engine.compute_logits(message.plan(dtype))


if __name__ == "__main__":
    sys.exit(main())
