"""Client processes that are killed in the middle of their streams.

Run as `python -m benchmarks.soak.killed_client TARGET STREAMS TOKENS TEXT`, this is such a client: it opens STREAMS
streams, prints "started" once each of them has produced a token, and reads them to the end.
"""

import asyncio
import contextlib
import random
import sys
import time

import grpc.aio

from benchmarks.soak.client_log import ClientLog
from benchmarks.soak.requests import stream_request
from tgis.bench.grpc_client import CHANNEL_OPTIONS
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

_STREAMS = 4  # per client
_PAUSE_SECONDS = 3.0  # at most, between clients: starting Python takes CPU time from the server
_START_SECONDS = 60.0
_TEXT = "Once upon a time"


async def kill_clients(target: str, new: int, seconds: float, log: ClientLog, draw: random.Random) -> None:
    """Start one client after the other, and kill each soon after its streams have started, sometimes before."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        command = (sys.executable, "-m", "benchmarks.soak.killed_client", target, str(_STREAMS), str(new), _TEXT)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        patience = _START_SECONDS if draw.random() < 0.8 else draw.random()
        try:
            started = bool(await asyncio.wait_for(process.stdout.readline(), patience))
            await asyncio.sleep(0.1 * draw.random())
        except TimeoutError:
            started = False
        with contextlib.suppress(ProcessLookupError):  # it has exited: its streams have ended
            process.kill()
        if code := max(await process.wait(), 0):
            log.add_problem(f"a client failed with exit code {code}")
        _record_killed(log, started=started)
        await asyncio.sleep(_PAUSE_SECONDS * draw.random())


def _record_killed(log: ClientLog, *, started: bool) -> None:
    log.killed_clients += 1
    for _ in range(_STREAMS):
        if started:
            log.record_call("stream", 1)
            log.abandoned["stream"] += 1
        else:
            log.record_uncertain("stream", 1)


async def _read_stream(stub: GenerationServiceStub, new: int, text: str, begun: asyncio.Event) -> None:
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=new, min_new_tokens=new))
    async for message in stub.GenerateStream(stream_request(text, params)):
        if message.generated_token_count:
            begun.set()


async def _main(target: str, count: int, new: int, text: str) -> None:
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel, asyncio.TaskGroup() as group:
        stub = GenerationServiceStub(channel)
        streams = [asyncio.Event() for _ in range(count)]
        for begun in streams:
            group.create_task(_read_stream(stub, new, text, begun))
        for begun in streams:
            await begun.wait()
        print("started", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
