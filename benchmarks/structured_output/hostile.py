"""Streams beside random grammars: `python -m benchmarks.structured_output.hostile`.

Clients keep sending random and expensive grammars to a server of SmolLM2, and for comparison, in rounds that alternate,
the same requests without them. The gaps between the tokens of other streams should be the same. The last line is JSON.
"""

import argparse
import asyncio
import collections
import itertools
import json
import random
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

from benchmarks.serving import running_server
from benchmarks.structured_output.random_grammars import random_grammar
from tgis.models.demo.fetch import ensure
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

STREAMS, STREAM_TOKENS = 4, 200
CLIENTS, NEW_TOKENS = 4, 24


async def gaps_of_stream(stub: GenerationServiceStub, number: int) -> list[float]:
    """Milliseconds between its messages."""
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text=f"Story {number}: once upon a time"))
    request.params.stopping.max_new_tokens = request.params.stopping.min_new_tokens = STREAM_TOKENS
    times = [perf_counter() async for message in stub.GenerateStream(request) if message.generated_token_count]
    return [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]


async def send_requests(
    stub: GenerationServiceStub, draw: random.Random, statuses: collections.Counter[str] | None
) -> None:
    """Until cancelled; with `statuses` they have grammars."""
    while True:
        request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="Once")])
        request.params.stopping.max_new_tokens = draw.randint(1, NEW_TOKENS)
        grammar = random_grammar(draw)
        if statuses is not None:
            request.params.decoding.CopyFrom(grammar)
        try:
            await stub.Generate(request)
        except grpc.aio.AioRpcError as error:
            if statuses is not None:
                statuses[error.code().name] += 1
        else:
            if statuses is not None:
                statuses["OK"] += 1


async def measure_round(target: str, seed: int, statuses: collections.Counter[str] | None) -> list[float]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        draws = (random.Random(f"{seed} {number}") for number in range(CLIENTS))
        others = [asyncio.create_task(send_requests(stub, draw, statuses)) for draw in draws]
        found = await asyncio.gather(*(gaps_of_stream(stub, number) for number in range(STREAMS)))
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    return [gap for gaps in found for gap in gaps]


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
    gaps: dict[str, list[float]] = {"no grammars": [], "random grammars": []}
    with running_server(ensure("smollm2", args.cache), args.cache) as server:
        for seed in range(args.rounds):
            gaps["no grammars"] += asyncio.run(measure_round(server.target, seed, None))
            gaps["random grammars"] += asyncio.run(measure_round(server.target, seed, statuses))
    report: dict[str, Any] = {name: figures(found) for name, found in gaps.items()}
    for name, found in report.items():
        print(f"{name:<16}", *(f"{key} {value:.1f}" for key, value in found.items()))
    print(json.dumps(report | {"statuses": statuses}))
    if args.json:
        args.json.write_text(json.dumps(report | {"statuses": statuses}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
