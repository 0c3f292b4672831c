"""An engine over several processes: this one is rank 0, which alone serves the batcher and chooses tokens.

The other ranks (`follower`) load their shard, warm up like rank 0, and then compute every step that they receive. Those
of this machine are started by rank 0, those of other nodes connect to it. All end if one dies or falls out of step.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import torch.distributed as dist

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines import load_shard
from tgis.engines.base import Engine, StepResult
from tgis.engines.distributed import ranks
from tgis.engines.distributed.mirror import SentSequences
from tgis.engines.distributed.rendezvous import Joined, address_of, gather
from tgis.engines.kernels.cpu.collectives import shared_bytes
from tgis.errors import StartError
from tgis.ipc.channel import encode_frame, receive_messages
from tgis.ipc.messages import EngineOptions, Fatal, Heartbeat, Shutdown

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_EXIT_SECONDS = 5.0
_CRASH_DETECTION_SECONDS = 2.0  # until the death of a process is noticed
_LAST_WORD_SECONDS = 0.1


class ShardedEngine(Engine):
    """An engine whose every step is computed by all ranks."""

    def __init__(
        self,
        options: EngineOptions,
        fail: Callable[[str], NoReturn],
        forward: Callable[[Heartbeat], None],
    ) -> None:
        """Wait for the other nodes and load. StartError if the model cannot be sharded or nodes differ.

        Later, `fail` is called with the reason when a rank fails, and `forward` with the heartbeats of the other ranks.
        """
        ranks.check_shardable(options)
        threads_per_rank = max(options.num_threads // options.ranks_per_node, 1)
        options = msgspec.structs.replace(options, num_threads=threads_per_rank)
        self._end, self._cpus = fail, os.sched_getaffinity(0)
        self._sent = SentSequences()
        self._followers: list[Follower] = []
        links = gather(options) if options.nnodes > 1 else {}
        address = address_of(next(iter(links.values())).getsockname()) if links else _LOOPBACK
        if not links:
            memory = os.memfd_create("tgis-collectives")  # never closed: ranks open it by its number
            os.ftruncate(memory, shared_bytes(options.num_shards))
            options = msgspec.structs.replace(options, shared_memory=memory, cluster_interface=None)
        log.info("%d ranks compute every step", options.num_shards)
        with self._collective("loading"):
            ranks.use_interface(options.cluster_interface, address)
            store, name = ranks.host_store(address, options.num_shards)
            self._start_followers(options, links, name, forward)
            ranks.init_ranks(0, options.num_shards, store, options.ranks_per_node)
            self._engine, self.reason = load_shard(options)
        self.info = self._engine.info  # rank 0 speaks for all

    def _start_followers(
        self, options: EngineOptions, links: dict[int, socket.socket], store: str, forward: Callable[[Heartbeat], None]
    ) -> None:
        """Start the ranks of this machine and answer those of other nodes."""
        ends: dict[int, tuple[socket.socket, subprocess.Popen[bytes] | None]]
        ends = {rank: (link, None) for rank, link in links.items()}
        for rank in range(1, options.ranks_per_node):
            ends[rank] = _start_process(msgspec.structs.replace(options, rank=rank), store)
        for rank, (sock, process) in ends.items():
            node = f" on node {rank // options.ranks_per_node}" if links else ""
            self._followers.append(Follower(f"rank {rank} of the engine{node}", sock, process, self._fail, forward))
            if process is None:
                self._followers[-1].send(encode_frame(Joined(store)))

    def warm_up(self) -> None:
        """Warm this rank up; the other ranks do the same after loading, unasked."""
        with self._collective("the first pass"):
            self._engine.warm_up()
        self.info = self._engine.info

    def step(self, plan: StepPlan) -> StepResult:
        """Run one step on all ranks. An error that leaves a rank waiting for another one ends all ranks."""
        plan = self._engine.with_drafts(plan)
        with self._collective("a step"):
            message = self._sent.step_input(plan)
            self._send(message)
        try:
            return self._engine.step(plan)
        except Exception:  # whatever fails a step here may have left followers waiting in it
            with self._collective("a step"):
                if not self._all_gave_up():
                    raise
            self._engine.discard_step()  # ranks may have stopped at different points
            raise

    def release(self, seqs: Collection[Sequence]) -> None:
        """Release sequences; the next step tells the other ranks."""
        self._sent.release(seqs)
        self._engine.release(seqs)

    def clear_cache(self) -> bool:
        """Clear the KV cache of all ranks."""
        with self._collective("clearing the KV cache"):
            self._send(ranks.ClearCache())
            return self._engine.clear_cache()

    def close(self) -> None:
        """Shut the other ranks down."""
        for follower in self._followers:
            follower.shut_down()
        dist.destroy_process_group()
        for follower in self._followers:
            follower.join()
        os.sched_setaffinity(0, self._cpus)

    def _send(self, message: ranks.RankMessage) -> None:
        frame = encode_frame(message)
        for follower in self._followers:
            follower.send(frame)

    def _all_gave_up(self) -> bool:
        """Whether no other rank waits in the step: all have failed in it, or computed it."""
        ranks.finish_collectives()
        self._send(ranks.GiveUp())
        deadline = time.monotonic() + _CRASH_DETECTION_SECONDS
        return all(follower.gave_up(deadline - time.monotonic()) for follower in self._followers)

    def _fail(self, reason: str) -> NoReturn:
        """End all ranks, and send the reason to other nodes."""
        for follower in self._followers:
            follower.send_reason(reason)
        self._end(reason)

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """A block in which ranks wait for each other. If it fails, the others are stuck, so all ranks end."""
        try:
            yield
        except StartError as error:
            self._fail(str(error))
        except Exception as error:  # any error here leaves the other ranks stuck
            log.exception("rank 0 failed in %s", what)
            # If this is the consequence of a dead rank, its watcher ends all ranks first, with the better reason.
            time.sleep(_CRASH_DETECTION_SECONDS)
            self._fail(f"rank 0 of the engine failed in {what}: {type(error).__name__}: {error}")


def _start_process(options: EngineOptions, store: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a rank of this machine."""
    ours, theirs = socket.socketpair()
    with theirs:
        fds = () if options.shared_memory is None else (options.shared_memory,)
        command = (sys.executable, "-m", "tgis.engines.distributed.follower", str(theirs.fileno()), store)
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(), *fds), process_group=0)  # no Ctrl-C
    ours.sendall(encode_frame(options))
    return ours, process


@dataclass(eq=False)
class Follower:
    """Rank 0's view of another rank: a child process, or a rank of another node, without `process`."""

    name: str
    link: socket.socket
    process: "subprocess.Popen[bytes] | None"
    fail: Callable[[str], NoReturn]
    forward: Callable[[Heartbeat], None]

    def __post_init__(self) -> None:
        self._sending = threading.Lock()
        self._shutting_down = False
        self._gave_up = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name=self.name)
        self._watcher.start()

    def send(self, frame: bytes) -> None:
        """OSError if the process is gone."""
        with self._sending:
            self.link.sendall(frame)

    def send_reason(self, reason: str) -> None:
        """Send to another node why all ranks end, unless it does not read. Child processes just end."""
        if self.process is None and self._sending.acquire(timeout=_LAST_WORD_SECONDS):
            with suppress(OSError):
                self.link.settimeout(_LAST_WORD_SECONDS)
                self.link.sendall(encode_frame(Fatal(reason)))

    def gave_up(self, seconds: float) -> bool:
        """Whether the rank answers in time that it has given up a step, or computed it."""
        answered = self._gave_up.wait(seconds)
        self._gave_up.clear()
        return answered

    def shut_down(self) -> None:
        """Ask the process to exit; `join` waits for it."""
        self._shutting_down = True
        with suppress(OSError):
            self.send(encode_frame(Shutdown()))

    def join(self) -> None:
        """Wait for exit; kill after a timeout."""
        self._watcher.join(_EXIT_SECONDS)
        if self.process:
            self.process.kill()
            self.process.wait()
        self.link.close()

    def _watch(self) -> None:
        """Read until end of file: heartbeats, answers, and the reason of a failure."""
        reason, gone = "", "has closed its connection"
        try:
            for message in receive_messages(self.link, Heartbeat | ranks.GiveUp | Fatal):
                match message:
                    case Heartbeat():
                        self.forward(message)
                    case ranks.GiveUp():
                        self._gave_up.set()
                    case Fatal(text):
                        reason = text
        except OSError as error:
            gone = f"is gone: {error.strerror or error}"
        if self.process:
            code = self.process.wait()
            gone = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if not self._shutting_down:
            self.fail(f"{self.name} {reason or gone}")
