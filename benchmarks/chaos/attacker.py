"""A process of hostile clients: `python -m benchmarks.chaos.attacker TARGET SECONDS SEED ATTACK...`.

TARGET is the JSON of a `Target`. A separate process keeps its work out of the event loop of the honest clients.
"""

import asyncio
import contextlib
import json
import logging
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.chaos.attacks import attack_until
from benchmarks.chaos.http2 import Target


def start_attacker(
    target: Target, seconds: float, seed: int, attacks: Sequence[str], *, yields: bool = False
) -> "subprocess.Popen[bytes]":
    """Start one process with a client for each attack; it ends by itself. With `yields` it runs on idle CPUs only."""
    values = json.dumps(asdict(target), default=str)
    command = [sys.executable, "-m", "benchmarks.chaos.attacker", values, str(seconds), str(seed), *attacks]
    process = subprocess.Popen([*(["chrt", "--idle", "0"] if yields else []), *command], start_new_session=True)
    if yields:
        with contextlib.suppress(OSError):  # autogroup: sessions share the CPUs whatever their scheduling class
            Path(f"/proc/{process.pid}/autogroup").write_text("19")
    return process


async def _attack(target: Target, seconds: float, seed: int, attacks: Sequence[str]) -> None:
    async with asyncio.TaskGroup() as group:
        for number, name in enumerate(attacks):
            group.create_task(attack_until(name, target, seconds, random.Random(f"{seed}/{number}")))


def _parse_target(text: str) -> Target:
    values = json.loads(text)
    return Target(**(values | {"ca": values["ca"] and Path(values["ca"])}))


if __name__ == "__main__":
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # the server drops connections
    asyncio.run(_attack(_parse_target(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
