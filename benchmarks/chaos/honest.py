"""The honest clients: small streams and unary calls, an ingress, large Tokenize calls, an OpenAI stream, probes."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import grpc.aio

from benchmarks.chaos.attacks import Target, open_channel
from benchmarks.openai_client import complete
from benchmarks.soak.memory import resident_bytes
from benchmarks.soak.requests import batch_request, stream_request
from tgis.bench.client import RequestRecord
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

TOKENS = 20
_STREAMS, _UNARY, _INGRESS_CALLS = 4, 2, 25
_TOKENIZED_CHARS = 30_000
_CALL_SECONDS = 30.0
_TEXT = "an honest client "
_PARAMS = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=TOKENS, min_new_tokens=TOKENS))
# Returns whether the answer is right.
Call = Callable[[GenerationServiceStub], Awaitable[bool]]


def expected_text(tokens: int) -> str:
    """The engine `fake` repeats the prompt, a byte per token."""
    return (_TEXT * tokens)[:tokens]


@dataclass(slots=True)
class HonestClients:
    """All honest clients of a server, and what they have seen."""

    target: Target
    server_pid: int
    succeeded: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    slowest_probe: float = 0.0  # seconds
    peak_memory: int = 0  # bytes

    async def run(self, seconds: float) -> None:
        """Make calls for `seconds`, and wait until they end."""
        until = time.monotonic() + seconds
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            calls = [self.stream] * _STREAMS + [self.unary] * _UNARY + [self.tokenize]
            tasks = [self._repeat(call, open_channel(self.target.grpc_port), until) for call in calls]
            ingress = open_channel(self.target.grpc_port)
            tasks += [self._repeat(self.unary, ingress, until) for _ in range(_INGRESS_CALLS)]
            tasks += [self._openai_streams(session, until), self._watch_memory(until)]
            tasks += [self._probe(f"{self.target.url}/{path}", until) for path in ("health", "metrics")]
            for task in tasks:
                group.create_task(task)

    async def stream(self, stub: GenerationServiceStub) -> bool:
        request = stream_request(_TEXT, _PARAMS)
        call = stub.GenerateStream(request, timeout=_CALL_SECONDS, metadata=self.target.metadata)
        return "".join([message.text async for message in call]) == expected_text(TOKENS)

    async def unary(self, stub: GenerationServiceStub) -> bool:
        request = batch_request([_TEXT], _PARAMS)
        answer = await stub.Generate(request, timeout=_CALL_SECONDS, metadata=self.target.metadata)
        return [response.text for response in answer.responses] == [expected_text(TOKENS)]

    async def tokenize(self, stub: GenerationServiceStub) -> bool:
        request = pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a" * _TOKENIZED_CHARS)])
        answer = await stub.Tokenize(request, timeout=_CALL_SECONDS, metadata=self.target.metadata)
        await asyncio.sleep(1.0)
        return [response.token_count for response in answer.responses] == [_TOKENIZED_CHARS]

    async def _repeat(self, call: Call, channel: grpc.aio.Channel, until: float) -> None:
        async with channel:
            stub = GenerationServiceStub(channel)
            while time.monotonic() < until:
                try:
                    self._count(right=await call(stub))
                except grpc.aio.AioRpcError as error:
                    self.failed[f"{error.code().name}: {error.details()}"] += 1
                    await asyncio.sleep(0.1)

    async def _openai_streams(self, session: aiohttp.ClientSession, until: float) -> None:
        async with session.get(f"{self.target.url}/v1/models", headers=dict(self.target.metadata)) as answer:
            model = (await answer.json())["data"][0]["id"]
        while time.monotonic() < until:
            try:
                record = RequestRecord(0.0, TOKENS)
                text = await complete(session, self.target.url, model, _TEXT, record, self.target.token)
                self._count(right=text == expected_text(TOKENS))
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failed[f"HTTP: {error!r}"] += 1
                await asyncio.sleep(0.1)

    def _count(self, *, right: bool) -> None:
        self.succeeded += right
        self.wrong += not right

    async def _probe(self, url: str, until: float) -> None:
        """Ask once a second on a new connection, as Kubernetes and Prometheus do."""
        timeout = aiohttp.ClientTimeout(10.0)
        while (started := time.monotonic()) < until:
            try:
                async with aiohttp.request("GET", url, timeout=timeout, raise_for_status=True) as answer:
                    await answer.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failed[f"{url}: {error!r}"] += 1
            self.slowest_probe = max(self.slowest_probe, time.monotonic() - started)
            await asyncio.sleep(started + 1.0 - time.monotonic())

    async def _watch_memory(self, until: float) -> None:
        while time.monotonic() < until:
            self.peak_memory = max(self.peak_memory, resident_bytes(self.server_pid))
            await asyncio.sleep(0.1)
