"""`python -m benchmarks.rolling_restarts`: two replicas restarted in turn, under clients that never stop.

gRPC clients have the service config of `deployment/`, or round robin alone; HTTP clients go to the other replica after
a 503, and heed Retry-After. With retries no call may fail and no stream break; without, UNAVAILABLE and CANCELLED are
the only statuses.
The last line is one JSON object; the exit code is 1 when anything is wrong.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from benchmarks.serving import Server, free_ports, running_server
from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

SERVICE_CONFIG = Path(__file__).parents[1] / "deployment" / "grpc-service-config.json"
TEXT, NEW_TOKENS = "again and again ", 20
WANTED = (TEXT * NEW_TOKENS)[:NEW_TOKENS]  # a token is a character, and the engine repeats its input
CLIENTS = 16  # of each kind
KINDS = ("grpc with retries", "grpc without", "http")
_PARAMS = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=NEW_TOKENS))
_ATTEMPTS = 20


class Replica:
    """A server that comes back on the same ports."""

    def __init__(self, model: Path, cache: Path, name: str) -> None:
        self.ports = free_ports()
        self._model, self._cache, self._log = model, cache, cache / f"{name}.log"
        self._stack = contextlib.ExitStack()
        self._server: Server | None = None

    def start(self) -> None:
        fake = "--deployment-framework=fake"
        running = running_server(self._model, self._cache, fake, log=self._log, ports=self.ports)
        self._server = self._stack.enter_context(running)

    def stop(self) -> float:
        """End it as Kubernetes does; return the seconds that it took."""
        started = time.monotonic()
        assert self._server is not None
        if code := self._server.stop():
            raise RuntimeError(f"exit code {code}, see {self._log}")
        self._stack.close()
        return time.monotonic() - started


class Clients:
    """What the clients have seen."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._replicas = replicas
        self.ends = {kind: Counter[str]() for kind in KINDS}
        self._over = False

    async def run(self, restarts: Awaitable[Any]) -> None:
        """Make calls until the restarts are done."""
        config = json.loads(SERVICE_CONFIG.read_text())
        plain = {"loadBalancingConfig": config["loadBalancingConfig"]}
        async with self._channel(config) as first, self._channel(plain) as second, aiohttp.ClientSession() as session:
            calls = {
                KINDS[0]: [self._call_grpc(GenerationServiceStub(first), number % 2 > 0) for number in range(CLIENTS)],
                KINDS[1]: [self._call_grpc(GenerationServiceStub(second), number % 2 > 0) for number in range(CLIENTS)],
                KINDS[2]: [self._call_http(session, number) for number in range(CLIENTS)],
            }
            loops = [asyncio.create_task(self._repeat(kind, call)) for kind in KINDS for call in calls[kind]]
            await restarts
            self._over = True
            await asyncio.gather(*loops)

    def _channel(self, config: dict[str, Any]) -> grpc.aio.Channel:
        addresses = ",".join(f"127.0.0.1:{replica.ports[0]}" for replica in self._replicas)
        options = [("grpc.service_config", json.dumps(config)), ("grpc.max_reconnect_backoff_ms", 500)]
        return grpc.aio.insecure_channel(f"ipv4:{addresses}", options)

    async def _repeat(self, kind: str, call: Callable[[], Awaitable[str]]) -> None:
        while not self._over:
            self.ends[kind][await call()] += 1

    def _call_grpc(self, stub: Any, streams: bool) -> Callable[[], Awaitable[str]]:
        """A call that returns how it has ended."""

        async def call() -> str:
            seen = ""
            try:
                if streams:
                    request = pb.GenerationRequest(text=TEXT)
                    async for part in stub.GenerateStream(pb.SingleGenerationRequest(request=request, params=_PARAMS)):
                        seen += part.text
                else:
                    requests = [pb.GenerationRequest(text=TEXT)]
                    answer = await stub.Generate(pb.BatchedGenerationRequest(requests=requests, params=_PARAMS))
                    seen = answer.responses[0].text
            except grpc.aio.AioRpcError as error:
                return error.code().name + (" in the middle" if seen else "")
            return "OK" if seen == WANTED else "wrong"

        return call

    def _call_http(self, session: aiohttp.ClientSession, number: int) -> Callable[[], Awaitable[str]]:
        turns = itertools.cycle(self._replicas[number % 2 :] + self._replicas[: number % 2])
        body = {"prompt": TEXT, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": number % 4 > 1}

        async def call() -> str:
            for _ in range(_ATTEMPTS):
                url = f"http://127.0.0.1:{next(turns).ports[1]}/v1/completions"
                try:
                    async with session.post(url, json=body) as answer:
                        if answer.status == 503:
                            await asyncio.sleep(float(answer.headers["Retry-After"]) / 10)  # the other one may be up
                            continue
                        text = await answer.text()
                except aiohttp.ClientConnectorError:  # nobody listens
                    continue
                except aiohttp.ClientError as error:
                    return type(error).__name__
                return "OK" if answer.status == 200 and _text(text, streams=body["stream"]) == WANTED else text[:200]
            return "given up"

        return call


def _text(body: str, *, streams: object) -> str:
    if not streams:
        return str(json.loads(body)["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events if event != "[DONE]")


async def restart(replicas: list[Replica], count: int, took: list[float]) -> None:
    """Restart them in turn, so often together."""
    for replica, _ in zip(itertools.cycle(replicas), range(count), strict=False):
        await asyncio.sleep(1)
        took.append(await asyncio.to_thread(replica.stop))
        await asyncio.to_thread(replica.start)
        await asyncio.sleep(1)  # for clients to see it


async def main(count: int) -> bool:
    with tempfile.TemporaryDirectory() as name:
        directory, took = Path(name), list[float]()
        model = make_fake_model(directory / "model", step_seconds=0.002)
        replicas = [Replica(model, directory, f"replica {number}") for number in range(2)]
        for replica in replicas:
            replica.start()
        clients = Clients(replicas)
        await clients.run(restart(replicas, count, took))
        for replica in replicas:
            replica.stop()
    without = {end.removesuffix(" in the middle") for end in clients.ends[KINDS[1]]}
    good = all({*clients.ends[kind]} == {"OK"} for kind in (KINDS[0], KINDS[2])) and without <= {
        "OK",
        "UNAVAILABLE",
        "CANCELLED",
    }
    print(json.dumps({"restarts": count, "ends": clients.ends, "slowest_end_s": round(max(took), 2), "good": good}))
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rolling_restarts", description=__doc__)
    parser.add_argument("--restarts", type=int, default=20, help="of both replicas together")
    sys.exit(not asyncio.run(main(parser.parse_args().restarts)))
