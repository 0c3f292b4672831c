"""A process of hostile clients: `python -m benchmarks.chaos.attacker TARGET SECONDS SEED ATTACK...`.

TARGET is the JSON of a `Target`. A separate process keeps its work out of the event loop of the honest clients.
At its end, also by SIGTERM, it prints as JSON how many calls of each attack have reached the server.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.chaos.attacks import attack_until
from benchmarks.chaos.http2 import Target, reached

_STOP_SECONDS = 20.0


def start_attacker(
    target: Target, seconds: float, seed: int, attacks: Sequence[str], *, yields: bool = False
) -> "subprocess.Popen[bytes]":
    """Start one process with a client for each attack; it ends by itself. With `yields` it runs on idle CPUs only."""
    values = json.dumps(asdict(target), default=str)
    command = [sys.executable, "-m", "benchmarks.chaos.attacker", values, str(seconds), str(seed), *attacks]
    command = [*(["chrt", "--idle", "0"] if yields else []), *command]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    if yields:
        with contextlib.suppress(OSError):  # autogroup: sessions share the CPUs whatever their scheduling class
            Path(f"/proc/{process.pid}/autogroup").write_text("19")
    return process


def wait_started(process: "subprocess.Popen[bytes]") -> None:
    """Return once its attacks have begun, or it has ended."""
    assert process.stdout is not None
    process.stdout.readline()


def stop_attacker(process: "subprocess.Popen[bytes]") -> Counter[str]:
    """Stop one, and return its calls that have reached the server; CalledProcessError if it has failed."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return Counter(json.loads(output.splitlines()[-1]))


async def _attack(target: Target, seconds: float, seed: int, attacks: Sequence[str]) -> None:
    tasks = [
        asyncio.create_task(attack_until(name, target, seconds, random.Random(f"{seed}/{number}")))
        for number, name in enumerate(attacks)
    ]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("attacks", flush=True)
    await asyncio.wait([asyncio.create_task(stop.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()  # raises what has ended it
    print(json.dumps(reached), flush=True)
    os._exit(0)  # thousands of calls need not end in order


def _parse_target(text: str) -> Target:
    values = json.loads(text)
    return Target(**(values | {"ca": values["ca"] and Path(values["ca"])}))


if __name__ == "__main__":
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # the server drops connections
    asyncio.run(_attack(_parse_target(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
