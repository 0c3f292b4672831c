"""HTTP clients that disconnect all at once: how long their rows stay in the batch, and what stays in memory.

The fake engine makes one token for every stream in each step. Its process sleeps once the last row is free.
"""

import argparse
import asyncio
import json
import random
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import Server, running_server
from benchmarks.soak.memory import resident_bytes
from demo.fake_model import make_fake_model

READERS, ROUNDS = 500, 4
STEP_SECONDS = (0.05, 0.2)  # at 50 ms, writing the tokens keeps a core busy
_SETTLED_STEPS, _WATCHED_STEPS = 4, 10  # steps before and after the readers vanish
_BODY = json.dumps({"inputs": "a text " * 8, "parameters": {"max_new_tokens": 1000}}).encode()
_REQUEST = (
    b"POST /generate_stream HTTP/1.1\r\nHost: [::]\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
)
_RESET = struct.pack("ii", 1, 0)  # close with RST


@dataclass(frozen=True, slots=True)
class Round:
    """The measurements of one round; times count from the last close."""

    reset: bool  # closed with RST, else with FIN
    closing_ms: float  # from the first close to the last
    last_step_ms: float  # when the last step with one of their rows ended
    front_end_cpu_ms: float
    front_end_memory_mib: float


def measure(step_seconds: float, readers: int, rounds: int, cache: Path) -> dict[str, Any]:
    options = ["--deployment-framework", "fake", "--max-batch-size", str(readers)]
    options += ["--max-concurrent-requests", str(readers)]
    with tempfile.TemporaryDirectory() as directory:
        model = make_fake_model(Path(directory), step_seconds=step_seconds)
        with running_server(model, cache, *options, log=Path(directory) / "log") as server:
            before = _memory_mib(server)
            found = [vanish(server, readers, step_seconds, reset=bool(number % 2)) for number in range(rounds)]
    return {"step_ms": 1000 * step_seconds, "memory_before_mib": before, "rounds": [asdict(each) for each in found]}


def vanish(server: Server, readers: int, step_seconds: float, *, reset: bool) -> Round:
    syscall = Path(f"/proc/{server.engine_pid()}/syscall")
    waiting = _syscall_number(syscall)
    sockets = asyncio.run(_open_streams(server.http_port, readers))
    time.sleep(_SETTLED_STEPS * step_seconds + random.random() * step_seconds)
    cpu, started = server.cpu_seconds(), time.monotonic()
    for each in sockets:
        if reset:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        each.close()
    closed = in_step = time.monotonic()
    while (now := time.monotonic()) < closed + _WATCHED_STEPS * step_seconds:
        if _syscall_number(syscall) != waiting:
            in_step = now
        time.sleep(0.001)
    return Round(
        reset=reset,
        closing_ms=round(1000 * (closed - started), 1),
        last_step_ms=round(1000 * (in_step - closed), 1),
        front_end_cpu_ms=round(1000 * (server.cpu_seconds() - cpu), 1),
        front_end_memory_mib=_memory_mib(server),
    )


def _syscall_number(file: Path) -> str:
    return file.read_text().split()[0]


def _memory_mib(server: Server) -> float:
    return round(resident_bytes(server.pid) / (1 << 20), 1)


async def _open_streams(port: int, count: int) -> list[socket.socket]:
    return await asyncio.gather(*(_stream(port) for _ in range(count)))


async def _stream(port: int) -> socket.socket:
    """Open a stream and wait for its first event."""
    client, loop = socket.socket(), asyncio.get_running_loop()
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, _REQUEST % (len(_BODY), _BODY))
    while b"data:" not in await loop.sock_recv(client, 1 << 16):
        pass
    return client


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=READERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    args = parser.parse_args(arguments)
    print(json.dumps([measure(seconds, args.readers, args.rounds, args.cache) for seconds in STEP_SECONDS]))


if __name__ == "__main__":
    main()
