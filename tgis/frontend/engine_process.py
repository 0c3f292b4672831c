"""The engine process: spawned, watched and killed by the front end, which talks to it over a socket pair.

Its death is end-of-file on the socket.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from tgis.errors import Unavailable
from tgis.ipc import messages
from tgis.ipc.channel import FrameReader, encode_frame

TICK_SECONDS = 0.5  # all that a tick counts for, however late it is
HEARTBEAT_TIMEOUT = 3.0
_EXIT_TIMEOUT = 5.0
_DIED = "the engine process has ended"
_STOPPED = "the server has stopped"


class EngineWatchdog:
    """Judges from heartbeats and steps whether the engine process runs and makes progress.

    Call `tick` every TICK_SECONDS. Only time in which the front end itself runs counts: after a pause (docker pause, a
    debugger, a frozen VM), what the engine has sent is still unread, or the engine was paused as well.
    """

    def __init__(self, now: float) -> None:
        self._ticked_at = now
        self._awake = 0.0  # seconds counted until then; so are the times below
        self._last_progress = 0.0
        self._last_heartbeats = {0: 0.0}  # times by rank; ranks above 0 start to report while the model loads

    def tick(self, now: float) -> float:
        """Return by how many seconds this tick is late."""
        elapsed = now - self._ticked_at
        self._awake, self._ticked_at = self._time(now), now
        return max(elapsed - TICK_SECONDS, 0.0)

    def heartbeat(self, rank: int, now: float) -> None:
        self._last_heartbeats[rank] = self._time(now)

    def progress(self, now: float) -> None:
        """The engine has finished a step, or has got its first request."""
        self._last_progress = self._awake + min(now - self._ticked_at, TICK_SECONDS)  # inline: called for every step

    def seconds_stalled(self, now: float) -> float:
        """Time since the last progress."""
        return self._time(now) - self._last_progress

    def silence(self, now: float) -> str | None:
        """Which process of the engine has stopped sending heartbeats, and for how long."""
        rank = min(self._last_heartbeats, key=self._last_heartbeats.__getitem__)
        if (seconds := self._time(now) - self._last_heartbeats[rank]) <= HEARTBEAT_TIMEOUT:
            return None
        return f"no heartbeat of {f'rank {rank} of the engine' if rank else 'the engine process'} for {seconds:.0f} s"

    def _time(self, now: float) -> float:
        return self._awake + min(now - self._ticked_at, TICK_SECONDS)


class EngineProcess(asyncio.Protocol):
    """One engine process and this end of its socket; `EngineClient` adds the requests that are open in it."""

    def __init__(self) -> None:
        """Create it inside the event loop."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[messages.EngineInfo] = loop.create_future()
        self.died: asyncio.Future[str] = loop.create_future()  # its result says why
        self.fallback_reason = ""  # why it is not the engine asked for
        self.watchdog = EngineWatchdog(time.monotonic())
        self._heartbeats: dict[int, messages.Heartbeat] = {}  # the last of each rank
        self._reader = FrameReader(messages.FromEngine)
        self._on_message: Callable[[messages.FromEngine], None] = lambda _: None
        self._on_end: Callable[[], None] = lambda: None
        self.dead = False
        self.death_cause = ""
        self._death_task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, options: messages.EngineOptions) -> int:
        """Spawn the engine process and return its id; then `ready` or `died` gets a result."""
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            command = (sys.executable, "-m", "tgis.engine_core.main", str(fd))
            # In a session of its own it gets no Ctrl-C; uvloop has no `process_group`.
            self._process = await asyncio.create_subprocess_exec(*command, pass_fds=(fd,), start_new_session=True)
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self.send(options)
        return self._process.pid

    def listen(self, on_message: Callable[[messages.FromEngine], None], on_end: Callable[[], None]) -> None:
        """Pass on what the process says about requests, and the end of its socket."""
        self._on_message, self._on_end = on_message, on_end

    def send(self, message: messages.ToEngine) -> None:
        assert self._transport is not None
        self._transport.write(encode_frame(message))

    def check_alive(self) -> None:
        """Unavailable if the process has ended."""
        if self.dead:
            raise Unavailable(self.death_cause)

    @property
    def num_dropped_log_lines(self) -> int:
        """Log lines that nobody read in time, of all processes of the engine."""
        return sum(each.num_dropped_log_lines for each in self._heartbeats.values())

    @property
    def resident_cache_bytes(self) -> int:
        """Bytes of the KV cache that take memory, a second ago."""
        return sum(each.resident_cache_bytes for each in self._heartbeats.values())

    def kill(self, cause: str) -> None:
        """Kill the engine process, if it has not ended."""
        assert self._process is not None
        self.death_cause = self.death_cause or cause
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and asyncio is about to say so
                os.killpg(self._process.pid, signal.SIGKILL)  # compilers that it has started as well

    @property
    def exit_code(self) -> int | None:
        """The exit code of the engine process; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def stop(self, *, at_once: bool = False) -> None:
        """Shut the engine process down and wait for its exit; kill it after a timeout, or at once."""
        if self._process is None:
            return
        if at_once or not self.ready.done():
            self.kill(_STOPPED)  # modules that it imports may not let it notice anything for seconds
        elif not self.dead:
            self.send(messages.Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT)
        except TimeoutError:
            self.kill(_STOPPED)
            await self._process.wait()
        if self._transport is not None:
            self._transport.close()

    def handle(self, message: messages.FromEngine) -> None:
        """Handle what the engine process says about itself; the rest goes to `listen`."""
        match message:
            case messages.Heartbeat(rank):
                self.watchdog.heartbeat(rank, time.monotonic())
                self._heartbeats[rank] = message
            case messages.Ready(info, reason):
                self.fallback_reason = reason
                self.ready.set_result(info)
            case messages.Fatal(text):
                self.death_cause = text
            case _:
                self._on_message(message)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self.handle(message)

    def connection_lost(self, _exc: Exception | None) -> None:
        """The engine process is gone: find out why."""
        self.dead = True
        self.death_cause = self.death_cause or _DIED
        self._on_end()
        self._death_task = asyncio.create_task(self._report_death())

    async def _report_death(self) -> None:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            code = await asyncio.wait_for(self._process.wait(), _EXIT_TIMEOUT)
            if self.death_cause == _DIED:
                self.death_cause = _describe_exit(code)
        self.died.set_result(self.death_cause)


async def wait_first(events: Sequence[asyncio.Future[Any]], timeout: float | None = None) -> None:
    await asyncio.wait(events, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def _describe_exit(code: int) -> str:
    if code < 0:
        hint = " (out of memory?)" if code == -9 else ""
        return f"the engine process was ended by signal {-code}{hint}"
    return f"the engine process ended with exit code {code}"
