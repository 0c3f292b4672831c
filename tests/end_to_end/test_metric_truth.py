"""The metrics against the clients' books, over calls of which 30 % are cancelled and 10 % fail.

Only what clients see goes into the books. While calls are cancelled the engine process is stopped: otherwise no client
could know how many of its tokens were on their way.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from harness import Server, running_fake

from benchmarks.soak.reconcile import MetricValues, nonzero_gauges, parse_metrics
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

MAX_BATCH_SIZE = 20
MAX_CONCURRENT_REQUESTS = 64
MAX_QUEUED_TOKENS = 6000
OPTIONS = {
    "MAX_BATCH_SIZE": MAX_BATCH_SIZE,
    "MAX_CONCURRENT_REQUESTS": MAX_CONCURRENT_REQUESTS,
    "MAX_QUEUED_TOKENS": MAX_QUEUED_TOKENS,
}
WORDS = ["the", "engine", "says", "what", "its", "prompt", "has", "said,", "over", "and", "over"]
POISON = "!"  # token 0 of the fake model

Action = Callable[[], Awaitable[None]]


class Client:
    """Makes calls, and keeps the books: series by name and label values."""

    def __init__(self, stub: GenerationServiceStub, draw: random.Random) -> None:
        self.books: Counter[tuple[str, ...]] = Counter()
        self.num_calls = 0
        self.num_received = 0  # tokens
        self._stub: Any = stub
        self._draw = draw

    async def complete_unary(self) -> None:
        """One to three inputs; beyond a stop sequence the engine may generate tokens that are in no answer."""
        num_inputs = self._draw.randint(1, 3)
        kind = "single" if num_inputs == 1 else "batch"
        for response in (await self._generate([self._text() for _ in range(num_inputs)], self._params())).responses:
            self._got_tokens(response.input_token_count)
            self.num_received += response.generated_token_count
            self._ended(kind, response, response.input_token_count)

    async def complete_stream(self) -> None:
        messages: list[pb.GenerationResponse] = []
        await self.read(self.open_stream(self._params()), messages)
        self._ended("stream", messages[-1], messages[0].input_token_count)

    async def poisoned_stream(self) -> None:
        """The prompt is computed, the step's token for it fails; it is too short for chunks."""
        stream = self.open_stream(self._params(), POISON)
        first = await stream.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        self.books["tgi_batch_prompt_tokens_total",] += first.input_token_count
        self.books["tgi_request_queue_duration_count",] += 1
        self.books["tgi_request_failure_total", "generate"] += 1

    async def refused(self, reason: str, texts: list[str], max_new_tokens: int = 5) -> None:
        params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens))
        with pytest.raises(grpc.aio.AioRpcError):
            await self._generate(texts, params)
        self.books["tgi_request_failure_total", reason] += 1

    async def cancelled_unary(self) -> None:
        """To be cancelled before it is scheduled."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._generate([self._text()], self._params())

    def open_stream(self, params: pb.Parameters, text: str = "") -> Any:
        self._called("stream", 1)
        return self._stub.GenerateStream(
            pb.SingleGenerationRequest(request=pb.GenerationRequest(text=text or self._text()), params=params)
        )

    async def read(self, stream: Any, messages: list[pb.GenerationResponse]) -> None:
        """Append the messages of a stream until its end, or until it is cancelled."""
        with contextlib.suppress(asyncio.CancelledError):
            async for message in stream:
                messages.append(message)
                self.num_received += len(message.tokens)
                if message.generated_token_count == 1:
                    self._got_tokens(messages[0].input_token_count)

    async def _generate(self, texts: list[str], params: pb.Parameters) -> pb.BatchedGenerationResponse:
        self._called("single" if len(texts) == 1 else "batch", len(texts))
        requests = [pb.GenerationRequest(text=text) for text in texts]
        response: pb.BatchedGenerationResponse = await self._stub.Generate(
            pb.BatchedGenerationRequest(requests=requests, params=params)
        )
        return response

    def _text(self) -> str:
        return " ".join(self._draw.choices(WORDS, k=self._draw.randint(1, 9)))

    def _params(self) -> pb.Parameters:
        stopping = pb.StoppingCriteria(
            max_new_tokens=self._draw.randint(1, 40), stop_sequences=self._draw.choice([[], ["v"]])
        )
        return pb.Parameters(stopping=stopping, response=pb.ResponseOptions(generated_tokens=True))

    def _called(self, kind: str, num_inputs: int) -> None:
        self.num_calls += 1
        self.books["tgi_request_count_total", kind] += 1
        self.books["tgi_request_input_count_total",] += num_inputs

    def _got_tokens(self, input_tokens: int) -> None:
        self.books["tgi_batch_prompt_tokens_total",] += input_tokens
        self.books["tgi_request_queue_duration_count",] += 1
        self.books["tgi_request_time_to_first_token_duration_count",] += 1

    def _ended(self, kind: str, last: pb.GenerationResponse, input_tokens: int) -> None:
        """What TGIS counts of inputs that succeed, and of no other."""
        tokens = last.generated_token_count
        self.books["tgi_request_success_total", kind, pb.StopReason.Name(last.stop_reason)] += 1
        self.books["tgi_request_generated_tokens_sum",] += tokens
        self.books["tgi_request_total_tokens_sum",] += input_tokens + tokens
        for name in ("duration", "inference_duration", "mean_time_per_token_duration", "generated_tokens"):
            self.books[f"tgi_request_{name}_count",] += 1


class Run:
    """100 calls, of which 60 succeed, 30 are cancelled and 10 fail."""

    def __init__(self, server: Server, client: Client) -> None:
        self._server = server
        self._client = client

    async def metrics(self) -> MetricValues:
        return parse_metrics((await asyncio.to_thread(self._server.get, "/metrics"))[1])

    async def until(self, condition: Callable[[MetricValues], bool]) -> MetricValues:
        """The metrics once they are so; the test times out if they never are."""
        while not condition(metrics := await self.metrics()):
            await asyncio.sleep(0.01)
        return metrics

    async def complete_and_fail(self, draw: random.Random) -> None:
        client = self._client
        too_many = ["a"] * (MAX_CONCURRENT_REQUESTS + 1)
        actions: list[Action] = [client.complete_unary for _ in range(30)]
        actions += [client.complete_stream] * 25
        actions += [lambda: client.refused("validation", too_many)] * 2
        actions += [lambda: client.refused("validation", ["a"], 99999)] * 3
        actions += [client.poisoned_stream] * 3
        draw.shuffle(actions)
        limit = asyncio.Semaphore(8)  # fewer inputs than are refused

        async def run(action: Action) -> None:
            async with limit:
                await action()

        await asyncio.gather(*map(run, actions))

    async def cancel(self) -> None:
        """20 streams while they run, 10 calls while they wait; 5 others that wait go on."""
        client = self._client
        stopping = pb.StoppingCriteria(max_new_tokens=1000, min_new_tokens=1000)  # not ended before
        params = pb.Parameters(stopping=stopping, response=pb.ResponseOptions(generated_tokens=True))
        running = [client.open_stream(params) for _ in range(MAX_BATCH_SIZE)]
        messages: list[list[pb.GenerationResponse]] = [[] for _ in running]
        readers = [asyncio.create_task(client.read(*pair)) for pair in zip(running, messages, strict=True)]
        while min(map(len, messages)) < 10:
            assert not any(reader.done() for reader in readers)
            await asyncio.sleep(0.005)
        with stopped(self._server.engine_pid()):
            cancelled = (await self.until(lambda now: answered(now) == client.num_received))[CANCELLED]
            queued = [client.open_stream(params) for _ in range(5)]
            unary = [asyncio.create_task(client.cancelled_unary()) for _ in range(5)]
            survivors = [asyncio.create_task(client.complete_stream()) for _ in range(5)]
            await self.until(lambda now: now["tgi_queue_size",] == 15)
            for _ in range(2):
                await client.refused("queue_full", ["word " * 300] * (MAX_QUEUED_TOKENS // 300))
            for call in (*queued, *unary):
                call.cancel()
            await self.until(lambda now: now[CANCELLED] == cancelled + 10)  # before there is room in the batch
            for call in running:
                call.cancel()
            await self.until(lambda now: now[CANCELLED] == cancelled + 30)
        client.books[CANCELLED] += 30
        await asyncio.gather(*readers, *survivors)


CANCELLED = ("tgi_request_failure_total", "cancelled")


def answered(metrics: MetricValues) -> float:
    return metrics["tgi_batch_generated_tokens_total",] - metrics["tgi_batch_discarded_tokens_total",]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def check(server: Server) -> None:
    draw = random.Random(7)
    async with grpc.aio.insecure_channel(server.target) as channel:
        client = Client(GenerationServiceStub(channel), draw)
        run = Run(server, client)
        await run.complete_and_fail(draw)
        await run.cancel()
        found = await run.until(lambda now: not nonzero_gauges(now))
    assert client.num_calls == 100
    counted = {key: value for key, value in found.items() if value and key[0] in {name for name, *_ in client.books}}
    assert counted == client.books
    assert answered(found) == client.num_received
    first_tokens = client.books["tgi_request_time_to_first_token_duration_count",]
    later = found["tgi_request_inter_token_latency_duration_count",]
    generated = found["tgi_batch_generated_tokens_total",]
    assert client.num_received - first_tokens <= later <= generated - first_tokens
    print(f"{client.num_received} tokens in answers, {generated:g} generated")


@pytest.mark.parametrize("kind", [{"block_size": 4}, {"padded": True}])
def test_counters_equal_the_books_of_the_clients(tmp_path: Path, kind: dict[str, Any]) -> None:
    steps = {"step_seconds": 0.002, "poison_token": 0} | kind
    with running_fake(tmp_path, steps, CACHE_DIR=tmp_path / "cache", **OPTIONS) as server:
        asyncio.run(check(server))
