"""`make soak`: serves the small demo model in float32 under random load, and reconciles its metrics with the clients.

The last line is one JSON object; the exit code is 1 when anything is wrong.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import grpc.aio

from benchmarks.serving import Server, running_server
from benchmarks.soak import reconcile
from benchmarks.soak.calls import SoakClient
from benchmarks.soak.cases import make_cases
from benchmarks.soak.client_log import ClientLog
from benchmarks.soak.idle import server_limits, use_full_capacity, wait_until_idle
from benchmarks.soak.killed_client import kill_clients
from benchmarks.soak.memory import MemoryMonitor
from benchmarks.soak.report import SoakReport, format_report, to_json
from demo.fetch import ensure
from tgis.bench.grpc_client import CHANNEL_OPTIONS
from tgis.bench.load import Budget, ClosedLoop
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

NUM_CASES = 24
MAX_CONCURRENT_REQUESTS = 512
MAX_QUEUED_TOKENS = 40_000  # more than the load ever queues, fewer than the last call does
SERVER_OPTIONS = (
    *("--dtype", "float32"),
    *("--max-batch-size", "32"),  # fewer than the calls in flight, so that some queue
    *("--kv-cache-size-mb", "4"),  # too few blocks for that batch size, so that sequences are preempted
    *("--max-concurrent-requests", str(MAX_CONCURRENT_REQUESTS)),
    *("--max-queued-tokens", str(MAX_QUEUED_TOKENS)),
)


async def soak(server: Server, seconds: float, in_flight: int, seed: int) -> SoakReport:
    """Load the server, wait until it is idle again, and check everything."""
    draw, log = random.Random(seed), ClientLog()
    monitor = MemoryMonitor({"server": server.pid, "engine": server.engine_pid()}, server.healthy)
    async with grpc.aio.insecure_channel(server.target, options=CHANNEL_OPTIONS) as channel:
        stub = GenerationServiceStub(channel)
        bounds = await server_limits(stub, MAX_CONCURRENT_REQUESTS)
        caller = SoakClient(channel, await make_cases(stub, bounds, NUM_CASES, draw), bounds, log, draw)
        before, started = reconcile.parse_metrics(server.metrics()), time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(monitor.run(seconds))
            group.create_task(kill_clients(server.target, bounds.max_sequence_length // 2, seconds, log, draw))
            group.create_task(ClosedLoop(in_flight).drive(caller.call, Budget(None, seconds)))
        elapsed = time.monotonic() - started
        after = await wait_until_idle(server, log)
        log.add_problems(reconcile.discrepancies(before, after, log))
        await use_full_capacity(stub, bounds, log)
        await wait_until_idle(server, log)
    log.add_problems(monitor.problems())
    return SoakReport(elapsed, in_flight, seed, log, monitor, preemptions=int(after[reconcile.PREEMPTIONS]))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="soak a server")
    parser.add_argument("--engine", default="hf_transformers", metavar="NAME")
    parser.add_argument("--minutes", type=float, default=15.0, metavar="M")
    parser.add_argument("--in-flight", type=int, default=64, metavar="N", help="calls at any time")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and every sample there too")
    args = parser.parse_args(arguments)
    model = ensure("glassllm", args.cache)
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with running_server(
            model, args.cache, "--deployment-framework", args.engine, *SERVER_OPTIONS, log=log
        ) as server:
            report = asyncio.run(soak(server, 60 * args.minutes, args.in_flight, args.seed))
            if code := server.stop():
                report.log.add_problem(f"the server's exit code is {code}")
        report.log.add_problems(line for line in log.read_text().splitlines() if "Traceback" in line)
    if args.json:
        args.json.write_text(json.dumps(to_json(report, samples=True)) + "\n")
    print(f"{args.engine}: {format_report(report)}")
    print(json.dumps({"engine": args.engine} | to_json(report, samples=False)))
    return 1 if report.log.num_problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
