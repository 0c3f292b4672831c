"""Engine `tgis_native` over several processes: this one is rank 0, which alone samples and serves the batcher.

The others (`follower`) load their shard, warm up as this one does, and then compute every step that they are sent. A
rank that dies or falls out of step ends them all at once.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgspec
import torch.distributed as dist

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.distributed import ranks
from tgis.engines.distributed.mirror import Deltas
from tgis.engines.loading.loader import load_config
from tgis.engines.paged import engine
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import TgisError
from tgis.ipc.channel import encode_frame, receive_messages
from tgis.ipc.messages import EngineInfo, EngineOptions, Fatal, Heartbeat, Shutdown

log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
_CRASH_DETECTION_SECONDS = 2.0  # ample for noticing that a process has died


def describe_memory(options: EngineOptions) -> list[str]:
    """What a start will need for each rank. StartError if the model cannot be sharded, or would find no room."""
    ranks.check_shardable(load_config(options), options.num_shards)
    return engine.describe_memory(options)


class ShardedEngine:
    """An engine whose every step is computed by all ranks."""

    def __init__(
        self,
        options: EngineOptions,
        fail: Callable[[str], NoReturn],
        forward: Callable[[Heartbeat], None],
    ) -> None:
        """StartError if the model cannot be sharded.

        Later, `fail` is called with the reason when a rank fails, and `forward` with the heartbeats of the other ranks.
        """
        ranks.check_shardable(load_config(options), options.num_shards)
        threads_per_rank = max(options.num_threads // options.num_shards, 1)
        options = msgspec.structs.replace(options, num_threads=threads_per_rank)
        self._fail = fail
        self._deltas = Deltas()
        store = os.memfd_create("tgis-ranks")  # never closed: torch opens it by its number until the end
        self._followers = [RankProcess(rank, options, store, fail, forward) for rank in range(1, options.num_shards)]
        log.info("%d ranks compute every step", options.num_shards)
        with self._collective("loading"):
            ranks.init_ranks(0, options.num_shards, store)
            self._engine = PagedEngine(options, ranks.all_reduce_min)

    @property
    def info(self) -> EngineInfo:
        """The info of all ranks, with LoRA turned off, since only rank 0 has adapters."""
        info = self._engine.info
        kv_cache_bytes = info.kv_cache_bytes * (1 + len(self._followers))
        return msgspec.structs.replace(info, lora_targets={}, kv_cache_bytes=kv_cache_bytes)

    def warm_up(self) -> None:
        """Warm this rank up; the other ranks do the same after loading, unasked."""
        with self._collective("the first pass"):
            self._engine.warm_up()

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step on all ranks; any failure ends them all."""
        with self._collective("a step"):
            message = encode_frame(self._deltas.encode(plan))
            for follower in self._followers:
                follower.send(message)
            return self._engine.step(plan)

    def release(self, seqs: Collection[Sequence]) -> None:
        """Release sequences; the other ranks hear of it with the next step."""
        self._deltas.release(seqs)
        self._engine.release(seqs)

    def clear_cache(self) -> bool:
        """Clear the KV cache of all ranks."""
        with self._collective("clearing the KV cache"):
            message = encode_frame(ranks.ClearCache())
            for follower in self._followers:
                follower.send(message)
            return self._engine.clear_cache()

    @property
    def resident_cache_bytes(self) -> int:
        """Bytes of rank 0's cache; the other ranks report theirs."""
        return self._engine.resident_cache_bytes

    def close(self) -> None:
        """Shut the other ranks down."""
        for follower in self._followers:
            follower.shut_down()
        dist.destroy_process_group()
        for follower in self._followers:
            follower.join()

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """A block in which ranks wait for each other: one that fails leaves the others stuck."""
        try:
            yield
        except TgisError as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("rank 0 failed in %s", what)
            # The rank that died says more than the ranks that missed it.
            self._followers[0].wait_for_crash(_CRASH_DETECTION_SECONDS)
            self._fail(f"rank 0 of the engine failed in {what}: {type(error).__name__}: {error}")


class RankProcess:
    """The process of another rank, as rank 0 sees it."""

    def __init__(
        self,
        rank: int,
        options: EngineOptions,
        store_fd: int,
        fail: Callable[[str], NoReturn],
        forward: Callable[[Heartbeat], None],
    ) -> None:
        self._rank = rank
        self._fail = fail
        self._forward = forward
        self._shutting_down = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            fds = theirs.fileno(), store_fd
            command = (sys.executable, "-m", "tgis.engines.distributed.follower", *map(str, fds), str(rank))
            self._process = subprocess.Popen(command, pass_fds=fds, process_group=0)  # no Ctrl-C
        self.send(encode_frame(options))
        self._watcher = threading.Thread(target=self._watch, daemon=True, name=f"rank {rank}")
        self._watcher.start()

    def send(self, message: bytes) -> None:
        """OSError if the process is gone."""
        self._socket.sendall(message)

    def wait_for_crash(self, seconds: float) -> None:
        """Give the watcher time to notice that the process died, and to end this one."""
        self._watcher.join(seconds)

    def shut_down(self) -> None:
        """Ask the process to exit; `join` waits for it."""
        self._shutting_down = True
        self.send(encode_frame(Shutdown()))

    def join(self) -> None:
        """Wait for exit; kill after a timeout."""
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watcher.join()
        self._socket.close()

    def _watch(self) -> None:
        """Read until end of file: heartbeats, and the reason of a failure."""
        last = ""
        try:
            for message in receive_messages(self._socket, Heartbeat | Fatal):
                match message:
                    case Heartbeat():
                        self._forward(message)
                    case Fatal(text):
                        last = text
        except OSError:
            log.debug("rank %d exited with messages unread", self._rank)
        code = self._process.wait()
        if not self._shutting_down:
            self._fail(f"rank {self._rank} of the engine {last or _describe_exit(code)}")


def _describe_exit(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
