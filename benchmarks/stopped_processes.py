"""`python -m benchmarks.stopped_processes`: SIGSTOP for the front end, the engine or both, on idle and busy servers.

No pause may kill a process or fail a call. Health must be off within 5 s after an engine is stopped, and on again soon
after it continues. Half of the pauses are longer than the step timeout. The last line is one JSON object; the exit code
is 1 when anything is wrong.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from benchmarks.serving import Server, running_server
from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

TARGETS = ("front end", "engine", "both")
MAX_SECONDS = 30.0
# A longer pause of the engine alone counts as a hang; pauses of the front end may be of any length.
STEP_TIMEOUT_SECONDS = {"front end": 10.0, "engine": 40.0, "both": 10.0}
HEALTH_SECONDS = 5.0
CALLS = 4
NEW_TOKENS = 300  # 20 ms each
TEXT = "again and again "
WANTED = (TEXT * NEW_TOKENS)[:NEW_TOKENS]  # a token is a character, and the engine repeats its input


@dataclass(frozen=True, slots=True)
class Pause:
    """What happened in one pause; times are in seconds."""

    target: str
    busy: bool
    seconds: float
    off: float | None  # from the start of the pause until /health was 503, if it was asked
    on: float | None  # from the end of the pause until /health was 200
    problems: list[str]


def pause_server(server: Server, target: str, draw: random.Random) -> Pause:
    """Stop processes of the server for a random time, with or without calls in flight."""
    engine, busy, seconds = server.engine_pid(), draw.random() < 0.5, draw.uniform(0.1, MAX_SECONDS)
    pids = {"front end": [server.pid], "engine": [engine], "both": [server.pid, engine]}[target]
    draw.shuffle(pids)
    problems: list[str] = []
    with calls(server, CALLS if busy else 0, problems):
        off = _stopped(server, pids, seconds, asks=target == "engine")
        on = _seconds_until(server, healthy=True, seconds=HEALTH_SECONDS)
    if target == "engine" and seconds > HEALTH_SECONDS and off is None:
        problems.append(f"health is on {seconds:.1f} s after the engine was stopped")
    if on is None:
        problems.append(f"health is off {HEALTH_SECONDS:g} s after the end of the pause")
    if server.process.poll() is not None or server.engine_pid() != engine:
        problems.append("a process has ended")
    return Pause(target, busy, seconds, off, on, problems)


def _stopped(server: Server, pids: list[int], seconds: float, *, asks: bool) -> float | None:
    """Stop processes for `seconds`; return the seconds until /health was 503, if `asks`."""
    ends = time.monotonic() + seconds
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    off = _seconds_until(server, healthy=False, seconds=min(seconds, HEALTH_SECONDS)) if asks else None
    time.sleep(max(ends - time.monotonic(), 0))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return off


def _seconds_until(server: Server, *, healthy: bool, seconds: float) -> float | None:
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < seconds:
        if server.healthy() is healthy:
            return elapsed
        time.sleep(0.05)
    return None


@contextlib.contextmanager
def calls(server: Server, count: int, problems: list[str]) -> Iterator[None]:
    """Calls that are in flight when the block starts and must end with their whole text after it."""
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS))
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=TEXT), params=params)
    with grpc.insecure_channel(server.target) as channel:
        streams = [GenerationServiceStub(channel).GenerateStream(request) for _ in range(count)]
        starts = [next(stream).text + next(stream).text for stream in streams]  # the input, and the first token
        yield
        for start, stream in zip(starts, streams, strict=True):
            try:
                text = "".join([start, *(message.text for message in stream)])
                if text != WANTED:
                    problems.append(f"a call got {text!r}")
            except grpc.RpcError as error:
                problems.append(f"a call failed: {error.code().name} {error.details()}")


def pause_servers(target: str, count: int, seed: int, directory: Path) -> list[Pause]:
    """Pause the processes of one server, one pause after the other."""
    draw = random.Random(f"{seed} {target} {directory.name}")
    model = make_fake_model(directory / "model", step_seconds=0.02)
    timeout = str(STEP_TIMEOUT_SECONDS[target])
    options = ("--deployment-framework", "fake", "--step-timeout-seconds", timeout, "--estimate-memory", "off")
    with running_server(model, directory, *options, log=directory / "server.log") as server:
        pauses = [pause_server(server, target, draw) for _ in range(count)]
        if code := server.stop():
            pauses[-1].problems.append(f"the exit code is {code}")
    return pauses


def report(pauses: list[Pause]) -> str:
    """A line for each kind of pause, and one for each problem."""
    lines = []
    for target, busy in itertools.product(TARGETS, (False, True)):
        some = [pause for pause in pauses if (pause.target, pause.busy) == (target, busy)]
        seconds = [pause.seconds for pause in some] or [0.0]
        off, on = _longest([pause.off for pause in some]), _longest([pause.on for pause in some])
        kind = f"{target:<10} {'busy' if busy else 'idle'}: {len(some):2} pauses"
        lines.append(
            f"{kind} of {min(seconds):.1f} to {max(seconds):.1f} s; health off after {off}, on again after {on}"
        )
    problems = [f"{each.target}, {each.seconds:.1f} s: {problem}" for each in pauses for problem in each.problems]
    return "\n".join([*lines, *problems])


def _longest(times: list[float | None]) -> str:
    return f"{max(seconds for seconds in times if seconds is not None):.1f} s" if any(times) else "-"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stopped_processes", description="stop processes of servers for a while"
    )
    parser.add_argument("--pauses", type=int, default=100, metavar="N")
    parser.add_argument("--servers", type=int, default=9, metavar="N", help="servers that are paused side by side")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    args = parser.parse_args(arguments)
    counts = [len(range(number, args.pauses, args.servers)) for number in range(args.servers)]
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(args.servers) as pool:
        running = []
        for number, count in enumerate(counts):
            own = Path(directory) / str(number)
            own.mkdir()
            running.append(pool.submit(pause_servers, TARGETS[number % len(TARGETS)], count, args.seed, own))
        pauses = [pause for each in running for pause in each.result()]
    print(report(pauses))
    print(json.dumps({"pauses": [asdict(pause) for pause in pauses]}))
    return 1 if any(pause.problems for pause in pauses) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
