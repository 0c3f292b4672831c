"""Engine `tgis_native` over several processes: this one is rank 0, which alone samples and knows the batcher.

The others (`follower`) load their share, warm up as this one does, and then compute every pass that they are
told. A rank that is lost, or not where the others are, ends them all at once.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import NoReturn

import msgspec
import torch.distributed as dist

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.distributed import ranks
from tgis.engines.loading.loader import load_config
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import TgisError
from tgis.ipc.framing import FrameReader, encode_frame
from tgis.ipc.messages import EngineInfo, EngineOptions, Fatal, Shutdown

log = logging.getLogger(__name__)

_RECV_BYTES = 1 << 16
_EXIT_SECONDS = 5.0
_CRASH_DETECTION_SECONDS = 2.0  # a process that died is known to be dead within less


class ShardedEngine:
    """An engine whose every pass is computed by all ranks."""

    def __init__(self, options: EngineOptions, fail: Callable[[str], NoReturn]) -> None:
        """StartError if the model cannot be shared out; later failures of any rank go to `end`."""
        ranks.check_shardable(load_config(options), options.num_shards)
        options = msgspec.structs.replace(options, num_threads=_threads_per_rank(options))
        self._fail = fail
        store = os.memfd_create("tgis-ranks")  # stays open: torch opens it by its number, to the very end
        self._followers = [RankProcess(rank, options, store, fail) for rank in range(1, options.num_shards)]
        log.info("%d ranks compute every step", options.num_shards)
        with self._collective("loading"):
            ranks.init_ranks(0, options.num_shards, store)
            self._engine = PagedEngine(options, ranks.all_reduce_min)

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model, in which adapters may change nothing: the other ranks have none."""
        return msgspec.structs.replace(self._engine.info, lora_targets={})

    def warm_up(self) -> None:
        """As all ranks do after loading, without being told."""
        with self._collective("the first pass"):
            self._engine.warm_up()

    def step(self, plan: StepPlan) -> StepResult:
        """One pass of all ranks; no failure leaves an engine that could go on."""
        with self._collective("a step"):
            message = encode_frame(ranks.StepInput.of(plan))
            for follower in self._followers:
                follower.send(message)
            return self._engine.step(plan)

    def release(self, rows: Rows[Sequence]) -> None:
        """Forget rows; the other ranks remember none."""
        self._engine.release(rows)

    def close(self) -> None:
        """Send the other ranks away."""
        for follower in self._followers:
            follower.shut_down()
        dist.destroy_process_group()
        for follower in self._followers:
            follower.join()

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """Where the ranks wait for each other: one that fails leaves the others in the middle of it."""
        try:
            yield
        except TgisError as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("rank 0 failed in %s", what)
            self._followers[0].wait_for_crash(
                _CRASH_DETECTION_SECONDS
            )  # who died, whichever, says more than who missed it
            self._fail(f"rank 0 of the engine failed in {what}: {type(error).__name__}: {error}")


class RankProcess:
    """Another rank's process, as seen from rank 0."""

    def __init__(self, rank: int, options: EngineOptions, store: int, fail: Callable[[str], NoReturn]) -> None:
        self._rank = rank
        self._fail = fail
        self._shutting_down = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            fds = theirs.fileno(), store
            command = (sys.executable, "-m", "tgis.engines.distributed.follower", *map(str, fds), str(rank))
            self._process = subprocess.Popen(command, pass_fds=fds, process_group=0)  # no Ctrl-C
        self.send(encode_frame(options))
        self._watcher = threading.Thread(target=self._watch, daemon=True, name=f"rank {rank}")
        self._watcher.start()

    def send(self, message: bytes) -> None:
        """Send a message; OSError if nobody is there."""
        self._socket.sendall(message)

    def wait_for_crash(self, seconds: float) -> None:
        """Give the watch time to end this process because that one is gone."""
        self._watcher.join(seconds)

    def shut_down(self) -> None:
        """Ask it to leave."""
        self._shutting_down = True
        self.send(encode_frame(Shutdown()))

    def join(self) -> None:
        """See to it that it has left."""
        try:
            self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._watcher.join()
        self._socket.close()

    def _watch(self) -> None:
        """Until the end of file: all that it ever says is why it ends."""
        reader, last = FrameReader(Fatal), ""
        try:
            while data := self._socket.recv(_RECV_BYTES):
                for fatal in reader.feed(data):
                    last = fatal.message
        except OSError:
            log.debug("rank %d left with messages unread", self._rank)
        code = self._process.wait()
        if not self._shutting_down:
            self._fail(f"rank {self._rank} of the engine {last or _describe_exit(code)}")


def _describe_exit(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _threads_per_rank(options: EngineOptions) -> int:
    """Those of one rank."""
    return max((options.num_threads or len(os.sched_getaffinity(0))) // options.num_shards, 1)
