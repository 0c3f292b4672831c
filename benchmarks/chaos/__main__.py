"""`make chaos`: attacks a server of the engine `fake`, one attack after the other, a new server for each.

Prints a JSON object with the figures of each attack; the exit code is 1 if a promise of `promises` is broken.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.chaos.attacks import ATTACKS, Target, attackers
from benchmarks.chaos.honest import HonestClients
from benchmarks.chaos.probes import EXCESSIVE, GRACE_SECONDS, SLOW, drain, longest
from benchmarks.chaos.promises import MAX_GROWTH_MIB, Figures, broken_promises, max_lag_ms
from benchmarks.serving import Server, running_server
from benchmarks.soak.memory import resident_bytes
from benchmarks.soak.reconcile import parse_metrics
from demo.fake_model import make_fake_model

_INPUTS_PER_CLIENT = 64
_WARM_UP_SECONDS = 2.0
_GIVE_UP_SECONDS = 30.0
_MEMORY_SECONDS = 60.0


def _serving(directory: Path, client_timeout: float) -> contextlib.AbstractContextManager[Server]:
    model = make_fake_model(directory / "model", step_seconds=0.05, block_size=16)
    (directory / "tokens").write_text("honest\nhostile\nprobe\n")
    options = {
        "deployment-framework": "fake",
        "auth-token-path": directory / "tokens",
        "max-concurrent-requests-per-client": _INPUTS_PER_CLIENT,
        "client-timeout-seconds": client_timeout,
        "shutdown-grace-seconds": GRACE_SECONDS,
    }
    flags = (f"--{name}={value}" for name, value in options.items())
    return running_server(model, directory / "cache", *flags, log=directory / "log")


async def measure(name: str, server: Server, seconds: float, client_timeout: float) -> Figures:
    """Attack a server that has just started, and stop it under attack."""
    _, authenticated = ATTACKS[name]
    figures = Figures(name, authenticated, client_timeout)
    hostile = Target(int(server.target.rpartition(":")[2]), server.http_port, "hostile" if authenticated else "")
    honest, probe = (replace(hostile, token=token) for token in ("honest", "probe"))
    await HonestClients(honest, server.pid).run(_WARM_UP_SECONDS)
    figures.memory_mib["before"] = _mib(resident_bytes(server.pid))
    with attackers(name, hostile):
        await _under_attack(figures, HonestClients(honest, server.pid), server, probe, seconds)
    figures.memory_mib["after"] = await _settled_memory(server.pid, figures.memory_mib["before"])
    figures.answers = hostile.answers.value
    with attackers(name, hostile):
        await asyncio.sleep(_WARM_UP_SECONDS)
        figures.lost_streams, figures.exit_code = await drain(server, honest)
    return figures


async def _under_attack(
    figures: Figures, clients: HonestClients, server: Server, probe: Target, seconds: float
) -> None:
    before, until = parse_metrics(server.metrics()), time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(clients.run(seconds))
        excessive, slow = (
            {name: group.create_task(longest(each, probe, until, _GIVE_UP_SECONDS)) for name, each in probes.items()}
            for probes in (EXCESSIVE, SLOW)
        )
    after = parse_metrics(await asyncio.to_thread(server.metrics))
    figures.lag_ms = max_lag_ms(before, after)
    figures.descriptors = len(os.listdir(f"/proc/{server.pid}/fd"))
    figures.memory_mib["peak"] = _mib(clients.peak_memory)
    figures.succeeded, figures.failed, figures.wrong = clients.succeeded, dict(clients.failed), clients.wrong
    figures.slowest_probe_s = round(clients.slowest_probe, 2)
    figures.refused_after_s = {name: round(task.result(), 2) for name, task in excessive.items()}
    figures.ended_after_s = {name: round(task.result(), 2) for name, task in slow.items()}


async def _settled_memory(pid: int, before: float) -> float:
    """MiB after a minute, or as soon as the promise is kept."""
    until = time.monotonic() + _MEMORY_SECONDS
    while (memory := _mib(resident_bytes(pid))) > before + MAX_GROWTH_MIB and time.monotonic() < until:
        await asyncio.sleep(1.0)
    return memory


def _mib(size: int) -> float:
    return round(size / (1 << 20), 1)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="attack a server")
    parser.add_argument("--attack", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="length of each attack (default 30)")
    args = parser.parse_args(arguments)
    reports = []
    for name in args.attack:
        client_timeout = max(2.0, args.seconds / 3)
        with (
            tempfile.TemporaryDirectory() as directory,
            _serving(Path(directory), client_timeout) as server,
        ):
            figures = asyncio.run(measure(name, server, args.seconds, client_timeout))
        reports.append(asdict(figures) | {"broken": list(broken_promises(figures))})
        print(f"{name}: {'; '.join(reports[-1]['broken']) or 'kept'}", flush=True)
    for report in reports:
        print(json.dumps(report))
    return int(any(report["broken"] for report in reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
