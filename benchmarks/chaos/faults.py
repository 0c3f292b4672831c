"""The faults: each is a context manager that undoes it at the end of the block."""

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.chaos.attacker import start_attacker, stop_attacker, wait_started
from benchmarks.chaos.attacks import ATTACKS
from benchmarks.chaos.fault_log import Notice
from benchmarks.chaos.files import AdapterFiles, CredentialFiles
from benchmarks.chaos.http2 import Target
from benchmarks.chaos.shim import Control, Shim
from benchmarks.chaos.supervisor import Supervisor

_MAX_ATTACK_SECONDS = 60.0  # attackers end by themselves if the soak is killed
_SPARE_BYTES = 8 << 20  # of address space under memory pressure


@dataclass(frozen=True, slots=True)
class Arena:
    """What faults act on."""

    supervisor: Supervisor
    shim: Shim
    adapters: AdapterFiles
    credentials: CredentialFiles
    hostile: Target  # the server, with the credentials of the attackers
    reached: Counter[str] = field(default_factory=Counter)  # attack -> its calls that have reached the server

    @property
    def front_end(self) -> int:
        return self.supervisor.server.pid

    @property
    def engine(self) -> int:
        return self.supervisor.server.engine_pid()


Apply = Callable[[Arena, random.Random], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and who may notice it."""

    apply: Apply
    notices: frozenset[Notice] = frozenset()

    @property
    def ends_processes(self) -> bool:
        return Notice.CALLS in self.notices


@asynccontextmanager
async def _stopped(pids: Callable[[Arena], list[int]], arena: Arena, _draw: random.Random) -> AsyncIterator[None]:
    chosen = pids(arena)
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def _controlled(
    control: Control, values: tuple[int, ...], arena: Arena, draw: random.Random
) -> AsyncIterator[None]:
    arena.shim.set(control, draw.choice(values))
    try:
        yield
    finally:
        arena.shim.set(control, 0)


@asynccontextmanager
async def _stuck_log(arena: Arena, _draw: random.Random) -> AsyncIterator[None]:
    arena.supervisor.log_flows.clear()
    try:
        yield
    finally:
        arena.supervisor.log_flows.set()


@contextmanager
def _soft_limit(pid: int, kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (value, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (soft, hard))


@asynccontextmanager
async def _no_descriptors(pid: Callable[[Arena], int], arena: Arena, _draw: random.Random) -> AsyncIterator[None]:
    """The process cannot open any further file descriptor."""
    chosen = pid(arena)
    highest = max(map(int, os.listdir(f"/proc/{chosen}/fd")))
    with _soft_limit(chosen, resource.RLIMIT_NOFILE, highest + 1):
        yield


@asynccontextmanager
async def _no_memory(arena: Arena, _draw: random.Random) -> AsyncIterator[None]:
    """The engine process can hardly allocate memory."""
    pages = int(Path(f"/proc/{arena.engine}/statm").read_text().split()[0])
    size = pages * resource.getpagesize()
    with _may_exit(arena, 1, *_NO_MEMORY):
        with _soft_limit(arena.engine, resource.RLIMIT_AS, size + _SPARE_BYTES):
            yield
        await arena.supervisor.wait_ready()


@contextmanager
def _may_exit(arena: Arena, code: int, *tracebacks: str) -> Iterator[None]:
    """The server may exit with this code, and log tracebacks with these words."""
    arena.supervisor.exit_codes, arena.supervisor.may_trace = frozenset({code}), tracebacks
    try:
        yield
    finally:
        arena.supervisor.exit_codes, arena.supervisor.may_trace = frozenset(), ()


@asynccontextmanager
async def _ended(
    pid: Callable[[Arena], int], number: int, code: int, arena: Arena, _draw: random.Random
) -> AsyncIterator[None]:
    """Send a signal to a process; the fault ends when the server is back."""
    life = arena.supervisor.lives
    with _may_exit(arena, code):
        os.kill(pid(arena), number)
        yield
        while arena.supervisor.lives == life:
            await asyncio.sleep(0.05)
        await arena.supervisor.wait_ready()


@asynccontextmanager
async def _adapter_swapped(arena: Arena, draw: random.Random) -> AsyncIterator[None]:
    """Swap the adapter between two versions at random intervals."""
    swapping = asyncio.create_task(_swap_for_ever(arena.adapters, draw))
    try:
        yield
    finally:
        swapping.cancel()


async def _swap_for_ever(files: AdapterFiles, draw: random.Random) -> None:
    while True:
        files.use(draw.choice("ab"))
        await asyncio.sleep(draw.random())


@asynccontextmanager
async def _adapter_damaged(arena: Arena, draw: random.Random) -> AsyncIterator[None]:
    arena.adapters.damage(draw)
    try:
        yield
    finally:
        arena.adapters.use("a")


@asynccontextmanager
async def _certificate_issued(days: int, arena: Arena, _draw: random.Random) -> AsyncIterator[None]:
    arena.credentials.issue(days)
    try:
        yield
    finally:
        arena.credentials.issue()


@asynccontextmanager
async def _token_rotated(arena: Arena, _draw: random.Random) -> AsyncIterator[None]:
    """Rotate the token: clients switch once the server must accept the new one; older calls may still be running."""
    new = arena.credentials.add_token()
    yield
    arena.credentials.token = new


@asynccontextmanager
async def _attacked(name: str, arena: Arena, draw: random.Random) -> AsyncIterator[None]:
    """Run an attack in a process that is stopped at the end."""
    process = start_attacker(arena.hostile, _MAX_ATTACK_SECONDS, draw.randrange(1 << 30), [name])
    try:
        await asyncio.to_thread(wait_started, process)
        yield
    finally:
        arena.reached.update(await asyncio.to_thread(stop_attacker, process))


_front_end: Callable[[Arena], int] = lambda arena: arena.front_end  # noqa: E731
_engine: Callable[[Arena], int] = lambda arena: arena.engine  # noqa: E731
_HEALTH, _NEW = frozenset({Notice.HEALTH}), frozenset({Notice.HEALTH, Notice.CONNECTIONS})
_ADAPTERS, _EVERYBODY = frozenset({Notice.ADAPTERS}), frozenset(Notice)
_DAY = 86400
_NO_MEMORY = "MemoryError", "OutOfMemory", "alloc", "memory", "start new thread"

FAULTS: dict[str, Fault] = {  # clients connect within 5 s, which a stopped front end cannot do
    "front end stopped": Fault(partial(_stopped, lambda arena: [arena.front_end]), _NEW),
    "engine stopped": Fault(partial(_stopped, lambda arena: [arena.engine]), _HEALTH | _ADAPTERS),
    "both stopped": Fault(partial(_stopped, lambda arena: [arena.engine, arena.front_end]), _NEW),
    "clock stepped": Fault(partial(_controlled, Control.CLOCK_OFFSET, (-_DAY // 2, -5, 5, 3600, _DAY // 2))),
    "disk slow": Fault(partial(_controlled, Control.OPEN_DELAY_MS, (50, 500, 2000)), _ADAPTERS),
    "disk of the log full": Fault(partial(_controlled, Control.LOG_FULL, (1,))),
    "log stuck": Fault(_stuck_log),
    "front end without descriptors": Fault(partial(_no_descriptors, _front_end), _NEW),
    "engine without descriptors": Fault(partial(_no_descriptors, _engine), _ADAPTERS),
    "adapter swapped": Fault(_adapter_swapped),
    "adapter damaged": Fault(_adapter_damaged, _ADAPTERS),
    "certificate rotated": Fault(partial(_certificate_issued, 365)),
    "certificate expired": Fault(partial(_certificate_issued, 0), frozenset({Notice.CONNECTIONS})),
    "token rotated": Fault(_token_rotated),
    **{name: Fault(partial(_attacked, name)) for name in ATTACKS},
    "engine without memory": Fault(_no_memory, _EVERYBODY),
    "engine killed": Fault(partial(_ended, _engine, signal.SIGKILL, 1), _EVERYBODY),
    "front end killed": Fault(partial(_ended, _front_end, signal.SIGKILL, -signal.SIGKILL), _EVERYBODY),
    "server terminated": Fault(partial(_ended, _front_end, signal.SIGTERM, 0), _EVERYBODY),
}
