"""`make chaos`: serves the small demo model in float32 under faults, for an hour.

The last line is one JSON object; the exit code is 1 when anything is lost, wrong or leaked.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.attacks import ATTACKS
from benchmarks.chaos.clients import HonestClients
from benchmarks.chaos.fault_log import FaultLog
from benchmarks.chaos.faults import FAULTS, Arena
from benchmarks.chaos.files import AdapterFiles, CredentialFiles
from benchmarks.chaos.http2 import Target
from benchmarks.chaos.rounds import Chaos
from benchmarks.chaos.shim import Shim
from benchmarks.chaos.supervisor import Supervisor
from demo.fetch import ensure

MAX_CONCURRENT_REQUESTS = 128  # of the honest clients, and as many of the hostile ones
_MIB = 1 << 20


def _server_options(
    engine: str, model: Path, cache: Path, adapters: AdapterFiles, credentials: CredentialFiles
) -> list[str]:
    options = {
        "deployment-framework": engine,
        "model-name": model,
        "cache-dir": cache,
        "dtype": "float32",
        "max-batch-size": 8,  # fewer than the calls in flight, so that some queue
        "kv-cache-size-mb": 4,  # too few blocks for that batch size, so that sequences are preempted
        "max-concurrent-requests": 2 * MAX_CONCURRENT_REQUESTS,
        "max-concurrent-requests-per-client": MAX_CONCURRENT_REQUESTS,
        "shutdown-grace-seconds": 5,
        "prefix-store-path": adapters.store,
        "tls-cert-path": credentials.cert,
        "tls-key-path": credentials.key,
        "auth-token-path": credentials.tokens,
    }
    return [f"--{name}={value}" for name, value in options.items()]


async def chaos(engine: str, model: Path, cache: Path, seconds: float, seed: int, kinds: list[str]) -> Chaos:
    """Run the server, the honest clients and the faults; the figures are in the report."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        shim, adapters, credentials = Shim(directory), AdapterFiles(directory, model), CredentialFiles(directory)
        options = _server_options(engine, model, cache, adapters, credentials)
        supervisor = Supervisor(options, os.environ | shim.environment)
        honest = Target(supervisor.grpc_port, supervisor.http_port, credentials.ca, api_port=supervisor.api_port)
        hostile = replace(honest, token=credentials.attackers_token)
        faults = FaultLog()
        clients = HonestClients(honest, credentials, adapters, faults, random.Random(seed))
        running = Chaos(Arena(supervisor, shim, adapters, credentials, hostile), clients, faults, seed)
        supervising = asyncio.create_task(supervisor.run())
        running_task = asyncio.current_task()
        assert running_task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running_task.cancel)  # stops the server, too
        try:
            await supervisor.wait_ready()
            await clients.prepare(MAX_CONCURRENT_REQUESTS)
            await running.run(seconds, kinds)
        finally:
            supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervising
            if code := supervisor.stop():
                running.report.problems.append(f"the server's exit code is {code}")
        running.report.problems += supervisor.exits
        missed = [name for name in ATTACKS if faults.counts[name] and not running.arena.reached[name]]
        running.report.problems += [f"no call of the attacker {name} has reached the server" for name in missed]
        running.report.leaks += [text for life in running.report.lives for text in life.growth()]
        return running


def _to_json(done: Chaos) -> dict[str, object]:
    report = done.report
    slopes = max((life for life in report.lives), key=lambda life: len(life.memory.get("engine", ()))).slopes()
    return {
        "rounds": report.rounds,
        "calls": dict(report.calls),
        "refused": dict(report.refused),
        "left_before_an_answer": report.uncertain,
        "compared": report.compared,
        "faults": dict(done.faults.counts),
        "reached": dict(done.arena.reached),
        "lives": len(report.lives),
        "lost_or_wrong": len(report.problems),
        "leaked": len(report.leaks),
        "memory_mib_per_minute": {name: round(slope / _MIB, 3) for name, slope in slopes.items()},
        "peak_memory_mib": {name: max(life.peaks[name] for life in report.lives) >> 20 for name in slopes},
        "memory": [life.memory for life in report.lives],  # minutes and bytes whenever the server was idle
        "problems": report.problems[:100],
        "leaks": report.leaks[:100],
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="soak a server under faults")
    parser.add_argument("--engine", default="tgis_native", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    model, cache = ensure("glassllm", args.cache), args.cache.absolute()
    done = asyncio.run(chaos(args.engine, model.absolute(), cache, 60 * args.minutes, args.seed, args.faults))
    values = json.dumps(_to_json(done))
    if args.json:
        args.json.write_text(values + "\n")
    for name in ATTACKS:
        if done.faults.counts[name]:
            print(f"attacker {name:<18} reached the server with {done.arena.reached[name]} calls")
    for life in done.report.lives:
        for name, samples in life.memory.items():
            idle = f"{samples[0][1] >> 20} MiB when first idle, {samples[-1][1] >> 20} when last"
            print(f"memory of the {name}: {idle}, {life.peaks[name] >> 20} at most")
    for problem in (*done.report.problems, *done.report.leaks):
        print(f"WRONG {problem}")
    print(values)
    return 1 if done.report.problems or done.report.leaks else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
