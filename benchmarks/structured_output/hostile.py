"""`python -m benchmarks.structured_output.hostile`: gaps between the tokens of streams beside random grammars.

Clients keep sending random and expensive grammars to a server of SmolLM2, one after the other. Each round is repeated
without grammars: the requests that succeeded are sent at the same moments with outputs of the same lengths. The gaps
between the tokens of the other streams should be the same in both. The last line is JSON.
"""

import argparse
import asyncio
import collections
import itertools
import json
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

from benchmarks.serving import running_server
from benchmarks.structured_output.random_grammars import random_grammar
from demo.fetch import ensure
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

STREAMS, STREAM_TOKENS = 4, 200
CLIENTS, NEW_TOKENS = 4, 24
WITH, WITHOUT = "random grammars", "no grammars"


async def gaps_of_stream(stub: GenerationServiceStub, number: int) -> list[float]:
    """Run a stream; return the gaps between its messages in milliseconds."""
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=f"Story {number}: once upon a time"))
    request.params.stopping.max_new_tokens = request.params.stopping.min_new_tokens = STREAM_TOKENS
    times = [perf_counter() async for message in stub.GenerateStream(request) if message.generated_token_count]
    return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True)
class Sent:
    """An answered request with a grammar."""

    at: float  # seconds from the beginning of its round
    tokens: int


async def send_grammars(
    stub: GenerationServiceStub, draw: random.Random, statuses: collections.Counter[str], answered: list[Sent]
) -> None:
    """Send requests with random grammars until cancelled."""
    started = perf_counter()
    while True:
        at = perf_counter() - started
        try:
            tokens = await generate(stub, draw.randint(1, NEW_TOKENS), grammar=random_grammar(draw))
        except grpc.aio.AioRpcError as error:
            statuses[error.code().name] += 1
        else:
            statuses["OK"] += 1
            answered.append(Sent(at, tokens))


async def repeat(stub: GenerationServiceStub, sent: list[Sent]) -> None:
    started = perf_counter()
    async with asyncio.TaskGroup() as group:
        for each in sorted(sent, key=lambda each: each.at):
            await asyncio.sleep(each.at - (perf_counter() - started))
            group.create_task(generate(stub, each.tokens, min_new_tokens=each.tokens))


async def generate(
    stub: GenerationServiceStub,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    grammar: pb.DecodingParameters | None = None,
) -> int:
    """Make a unary call; return the number of generated tokens."""
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="Once")])
    request.params.stopping.max_new_tokens, request.params.stopping.min_new_tokens = max_new_tokens, min_new_tokens
    if grammar:
        request.params.decoding.CopyFrom(grammar)
    (response,) = (await stub.Generate(request)).responses
    return int(response.generated_token_count)


async def gaps_beside(stub: GenerationServiceStub, others: list[asyncio.Task[None]]) -> list[float]:
    found = await asyncio.gather(*(gaps_of_stream(stub, number) for number in range(STREAMS)))
    for other in others:
        other.cancel()
    ends = await asyncio.gather(*others, return_exceptions=True)
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends), ends
    return [gap for gaps in found for gap in gaps]


async def measure_round(
    target: str, seed: int, gaps: dict[str, list[float]], statuses: collections.Counter[str]
) -> None:
    sent: list[Sent] = []
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        draws = (random.Random(f"{seed} {number}") for number in range(CLIENTS))
        clients = [asyncio.create_task(send_grammars(stub, draw, statuses, sent)) for draw in draws]
        gaps[WITH] += await gaps_beside(stub, clients)
        gaps[WITHOUT] += await gaps_beside(stub, [asyncio.create_task(repeat(stub, sent))])


def figures(gaps: list[float]) -> dict[str, float]:
    centiles = statistics.quantiles(gaps, n=1000)
    return {"p50_ms": centiles[499], "p99_ms": centiles[989], "p99.9_ms": centiles[998], "max_ms": max(gaps)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured_output.hostile", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    statuses = collections.Counter[str]()
    gaps: dict[str, list[float]] = {WITHOUT: [], WITH: []}
    with running_server(ensure("smollm2", args.cache), args.cache) as server:
        for seed in range(args.rounds):
            asyncio.run(measure_round(server.target, seed, gaps, statuses))
    report: dict[str, Any] = {name: figures(found) for name, found in gaps.items()}
    for name, found in report.items():
        print(f"{name:<16}", *(f"{key} {value:.1f}" for key, value in found.items()))
    print(json.dumps(report | {"statuses": statuses}))
    if args.json:
        args.json.write_text(json.dumps(report | {"statuses": statuses}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
