"""Honest streams beside 64 hostile clients: `python -m benchmarks.chaos.hostile`, the gate of changes to the front end.

A round measures twice: with the attacks on the server of the honest streams, and as its control on another server of
the same kind, where they cost as much CPU time but can only be in the way of the operating system's scheduler. Which
one comes first alternates. The last line is one JSON object; the exit code is 1 if a bound is broken.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from benchmarks.chaos.attacker import start_attacker, stop_attacker, wait_started
from benchmarks.chaos.attacks import ATTACKS, channel
from benchmarks.chaos.http2 import Target
from benchmarks.serving import Server, cpu_name, running_server
from benchmarks.soak.memory import resident_bytes
from benchmarks.soak.reconcile import MetricValues, parse_metrics
from benchmarks.soak.requests import stream_request
from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

CLIENTS, PROCESSES, STREAMS = 64, 4, 8
_TOKENS = 50
_STEP_SECONDS = 0.01
_MAX_INPUTS_PER_CLIENT = 32  # four times what the honest client has, and enough for every attack
_LAG = "tgi_event_loop_lag_duration_bucket"
_SAMPLE_SECONDS = 0.1
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(5.0)
_CONTROL = "control"

# The promise to honest clients.
_MAX_RATIO = 1.25  # of the 99th percentile of times to the first token, attacked by control
_MAX_LAG_MS = 100.0  # of the event loop; the histogram's bucket that ends at 98.5 ms is the last one within
_MAX_MEMORY_MIB = 700.0  # of the front end


@dataclass(slots=True)
class Figures:
    """What one run measured, in milliseconds and MiB."""

    lag_p999: float = 0.0
    lag_max: float = 0.0
    peak_memory: float = 0.0  # of the front end
    first_token_p50: float = 0.0
    first_token_p99: float = 0.0
    streams: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # honest streams, by reason
    wrong: int = 0  # answers
    slowest_health: float = 0.0
    unhealthy: dict[str, int] = field(default_factory=dict)  # probes, by reason
    not_reached: list[str] = field(default_factory=list)  # attacks without a call that reached the server
    waited: float = 0.0  # share of the time in which the front end's event loop was ready to run and no CPU was free


Round = Mapping[str, Figures]  # by what was attacked with, or `_CONTROL`


def ratios(rounds: Sequence[Round], name: str) -> list[float]:
    """The 99th percentile of times to the first token in each round, as a multiple of its control's."""
    return [each[name].first_token_p99 / each[_CONTROL].first_token_p99 for each in rounds]


def broken_bounds(rounds: Sequence[Round]) -> list[str]:
    """What contradicts the promise to honest clients: nothing, or the gate is closed."""
    attacks = [name for name in rounds[0] if name != _CONTROL]
    medians = {name: statistics.median(ratios(rounds, name)) for name in attacks}
    broken = [
        f"{name}: first token p99 {ratio:.2f} times the control's, median of {len(rounds)} rounds, not {_MAX_RATIO}"
        for name, ratio in medians.items()
        if not ratio <= _MAX_RATIO
    ]
    for number, figures in enumerate(rounds, 1):
        broken += [f"round {number}, {name}: {what}" for name in attacks for what in _attack_noticed(figures, name)]
        broken += [f"round {number}, {name}: {what}" for name, each in figures.items() for what in _faults(each)]
    return broken


def _attack_noticed(figures: Round, name: str) -> Iterator[str]:
    """What an attack did to the front end that its control did not."""
    attacked, control = figures[name], figures[_CONTROL]
    if attacked.lag_max > _MAX_LAG_MS >= control.lag_max:
        yield f"the event loop was up to {attacked.lag_max:.0f} ms late, not {_MAX_LAG_MS:.0f}"
    if attacked.peak_memory > _MAX_MEMORY_MIB:
        yield f"the front end had {attacked.peak_memory:.0f} MiB, not {_MAX_MEMORY_MIB:.0f}"


def _faults(figures: Figures) -> Iterator[str]:
    """What no run may show, attacked or not."""
    if not figures.streams:
        yield "no honest stream got a token"
    if figures.failed:
        yield f"honest streams failed: {figures.failed}"
    if figures.wrong:
        yield f"{figures.wrong} honest streams got the wrong text"
    if figures.not_reached:
        yield f"attackers that never reached the server: {', '.join(figures.not_reached)}"
    if figures.unhealthy:
        yield f"health probes failed: {figures.unhealthy}"


async def measure(server: Server, seconds: float) -> Figures:
    """Eight honest streams, one after the other, while somebody else may attack."""
    figures, first_tokens = Figures(), list[float]()
    before, until = parse_metrics(server.metrics()), time.monotonic() + seconds
    waited = _seconds_without_cpu(server.pid)
    async with asyncio.TaskGroup() as group:
        group.create_task(_watch(server, figures, until))
        group.create_task(_probe(server, figures, until))
        for number in range(STREAMS):
            group.create_task(_stream_until(server, number, until, figures, first_tokens))
    after = parse_metrics(await asyncio.to_thread(server.metrics))
    figures.lag_p999, figures.lag_max = (1000 * _lag_quantile(before, after, share) for share in (0.999, 1))
    figures.waited = round((_seconds_without_cpu(server.pid) - waited) / seconds, 3)
    figures.streams = len(first_tokens)
    first_tokens = sorted(first_tokens) or [seconds]  # none at all
    figures.first_token_p50, figures.first_token_p99 = (
        round(1000 * first_tokens[int(share * (len(first_tokens) - 1))], 1) for share in (0.5, 0.99)
    )
    return figures


async def _stream_until(server: Server, number: int, until: float, figures: Figures, first_tokens: list[float]) -> None:
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=_TOKENS))
    text = f"honest stream {number} "
    port = int(server.target.rpartition(":")[2])
    async with channel(Target(port, server.http_port)) as made:
        while time.monotonic() < until:
            started, got = time.monotonic(), ""
            try:
                stream = GenerationServiceStub(made).GenerateStream(
                    stream_request(text, params), metadata=(("authorization", "Bearer honest"),)
                )
                async for message in stream:
                    if message.text and not got:
                        first_tokens.append(time.monotonic() - started)
                    got += message.text
                figures.wrong += got != (text * _TOKENS)[:_TOKENS]
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                figures.failed[reason] = figures.failed.get(reason, 0) + 1
                await asyncio.sleep(0.1)


async def _watch(server: Server, figures: Figures, until: float) -> None:
    while time.monotonic() < until:
        figures.peak_memory = max(figures.peak_memory, round(resident_bytes(server.pid) / (1 << 20), 1))
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _probe(server: Server, figures: Figures, until: float) -> None:
    async with aiohttp.ClientSession(timeout=_HEALTH_TIMEOUT, connector=aiohttp.TCPConnector(force_close=True)) as http:
        while time.monotonic() < until:
            started = time.monotonic()
            if reason := await _why_unhealthy(http, server.http_port):
                figures.unhealthy[reason] = figures.unhealthy.get(reason, 0) + 1
            figures.slowest_health = max(figures.slowest_health, round(1000 * (time.monotonic() - started), 1))
            await asyncio.sleep(_SAMPLE_SECONDS)


def _seconds_without_cpu(pid: int) -> float:
    """How long the main thread, which runs the event loop, was ready to run and had no CPU."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


async def _why_unhealthy(http: aiohttp.ClientSession, port: int) -> str | None:
    try:
        async with http.get(f"http://127.0.0.1:{port}/health") as answer:
            return None if answer.ok else f"{answer.status}: {await answer.text()}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return repr(error)


def _lag_quantile(before: MetricValues, after: MetricValues, share: float) -> float:
    """Seconds: the upper edge of the quantile's bucket."""
    counts = {float(key[1]): value - before[key] for key, value in after.items() if key[0] == _LAG}
    total = counts[float("inf")]
    return min(edge for edge, count in counts.items() if count >= share * total)


@contextlib.contextmanager
def attacks_on(server: Server, seconds: float, names: list[str]) -> Iterator[Counter[str]]:
    """64 hostile clients in a few processes, which yield to everything else: they stand for other machines.

    After the block, the yielded counter has their calls that have reached the server.
    """
    target = Target(int(server.target.rpartition(":")[2]), server.http_port, token="hostile")  # noqa: S106 - no secret
    clients = list(islice(cycle(names), CLIENTS))
    processes = [start_attacker(target, seconds, n, clients[n::PROCESSES], yields=True) for n in range(PROCESSES)]
    reached = Counter[str]()
    try:
        for process in processes:
            wait_started(process)
        yield reached
    finally:
        for process in processes:
            reached.update(stop_attacker(process))


async def _run(directory: Path, seconds: float, names: list[str], *, attacked: bool, options: list[str]) -> Figures:
    model, cache = make_fake_model(directory / "model", step_seconds=_STEP_SECONDS, block_size=16), directory / "cache"
    tokens = directory / "tokens"
    tokens.write_text("honest\nhostile\n")
    options = ["--deployment-framework", "fake", "--auth-token-path", str(tokens), *options]
    options += ["--max-concurrent-requests-per-client", str(_MAX_INPUTS_PER_CLIENT)]
    with (
        running_server(model, cache, *options, log=directory / "log") as honest,
        running_server(model, cache, *options, log=directory / "other") as other,
    ):
        with attacks_on(honest if attacked else other, 2 * seconds + 60, names) as reached:
            await asyncio.sleep(2)  # the attackers have started
            figures = await measure(honest, seconds)
        figures.not_reached = [name for name in names if not reached[name]]
        return figures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.hostile", description="attack a server")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="options of the servers")
    parser.add_argument("--each", action="store_true", help="one attack after the other instead of all at once")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="the bound of the ratio is for their median")
    args = parser.parse_args(arguments)
    names: list[str] = random.Random(0).sample(args.attacks, len(args.attacks))
    options = [f"--{option}" for option in args.options]
    runs = {_CONTROL: names} | ({name: [name] for name in names} if args.each else {"attacked": names})
    rounds: list[dict[str, Figures]] = [{} for _ in range(args.rounds)]
    for number, found in enumerate(rounds):
        for title in list(runs)[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory() as directory:
                attacked = title != _CONTROL
                run = _run(Path(directory), args.seconds, runs[title], attacked=attacked, options=options)
                found[title] = asyncio.run(run)
            print(f"round {number + 1} {title:<16} {json.dumps(asdict(found[title]))}", flush=True)
    broken = broken_bounds(rounds)
    print(*(f"broken: {bound}" for bound in broken), sep="\n", end="\n" if broken else "")
    print(json.dumps(_report(rounds, broken)))
    return int(bool(broken))


def _report(rounds: Sequence[Round], broken: list[str]) -> dict[str, Any]:
    found = [{name: asdict(figures) for name, figures in each.items()} for each in rounds]
    by_attack = {name: ratios(rounds, name) for name in rounds[0] if name != _CONTROL}
    return {"cpu": cpu_name(), "rounds": found, "first_token_p99_ratios": by_attack, "broken": broken}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
