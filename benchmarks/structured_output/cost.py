"""`python -m benchmarks.structured_output.cost`: what a JSON schema costs.

One server of SmolLM2 streams with a schema on every row and with none, in turn; the ratios are medians of the pairs.
The schema asks for more than the outputs have tokens, so that both have the same number. The last line is JSON.
"""

import argparse
import asyncio
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

from benchmarks.serving import running_server
from benchmarks.structured_output.features import INTEGER, STRING, closed
from demo.fetch import ensure
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

STREAMS = (1, 8, 32)
NEW_TOKENS = 64
PERSON = closed(
    name={"type": "string", "maxLength": 30},
    age={"type": "integer", "minimum": 0, "maximum": 150},
    role={"enum": ["admin", "editor", "viewer"]},
    email={"type": "string", "format": "email"},
    tags={"type": "array", "items": STRING, "maxItems": 4},
)
LONG = closed(people={"type": "array", "items": PERSON, "minItems": 100})
FIXED = closed(
    None,
    **{
        f"{name} as of the beginning of the year": INTEGER | {"maximum": 9, "minimum": 0} for name in ("sales", "costs")
    },
)
WITH, WITHOUT = "schema", "none"


def make_request(number: int, schema: Any, new_tokens: int = NEW_TOKENS) -> pb.SingleGenerationRequest:
    request = pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=f"Employees of department {number} as JSON:\n")
    )
    request.params.stopping.max_new_tokens = new_tokens
    if schema is None:
        request.params.stopping.min_new_tokens = new_tokens
    else:
        request.params.decoding.json_schema = json.dumps(schema)
    return request


async def stream(stub: GenerationServiceStub, request: pb.SingleGenerationRequest) -> tuple[float, int]:
    """Seconds until the first token, and the number of tokens."""
    started, first, count = perf_counter(), 0.0, 0
    async for message in stub.GenerateStream(request):
        count = max(count, message.generated_token_count)
        first = first or (perf_counter() if count else 0.0)
    return first - started, count


async def tokens_per_second(stub: GenerationServiceStub, streams: int, schema: Any) -> float:
    started = perf_counter()
    outputs = await asyncio.gather(*(stream(stub, make_request(number, schema)) for number in range(streams)))
    assert all(count == NEW_TOKENS for _, count in outputs)
    return streams * NEW_TOKENS / (perf_counter() - started)


async def measure_throughput(stub: GenerationServiceStub, rounds: int) -> dict[int, dict[str, list[float]]]:
    figures: dict[int, dict[str, list[float]]] = {size: {WITH: [], WITHOUT: []} for size in STREAMS}
    kinds = [(WITHOUT, None), (WITH, LONG)]
    for number in range(rounds):
        for size, found in figures.items():
            for name, schema in kinds[:: -1 if number % 2 else 1]:  # in alternating order: carry-over affects both
                found[name].append(await tokens_per_second(stub, size, schema))
    return figures


async def measure_first_token(stub: GenerationServiceStub, repeats: int) -> dict[str, float]:
    """Time to first token on an idle server, in milliseconds."""
    times: dict[str, list[float]] = {"none": [], "cached": [], "new": []}
    for number in range(repeats):
        new = LONG | {"title": f"schema {number}"}
        for name, schema in (("none", None), ("cached", LONG), ("new", new)):
            seconds, _ = await stream(stub, make_request(number, schema, new_tokens=1))
            times[name].append(1e3 * seconds)
    return {name: statistics.median(values) for name, values in times.items()}


async def measure_forced_tokens(stub: GenerationServiceStub, repeats: int) -> dict[str, float]:
    """Tokens/s of a mostly fixed output, with forced tokens and without (asking for logprobs turns them off)."""
    rates: dict[str, list[float]] = {"forced": [], "with logprobs": []}
    for number in range(repeats):
        for name, found in rates.items():
            request = make_request(number, FIXED)
            request.params.response.generated_tokens = request.params.response.token_logprobs = name != "forced"
            started = perf_counter()
            _, count = await stream(stub, request)
            found.append(count / (perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


async def measure(target: str, rounds: int) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        await tokens_per_second(stub, max(STREAMS), LONG)
        return {
            "tokens_per_s": await measure_throughput(stub, rounds),
            "first_token_ms": await measure_first_token(stub, 2 * rounds),
            "forced_tokens_per_s": await measure_forced_tokens(stub, rounds),
        }


def print_report(report: dict[str, Any]) -> None:
    print(f"{'streams':>8} {'no schema':>10} {'schema':>8} {'ratio':>6} {'quartiles':>12}")
    for size, found in report["tokens_per_s"].items():
        low, ratio, high = statistics.quantiles(
            one / other for one, other in zip(found[WITH], found[WITHOUT], strict=True)
        )
        without, with_schema = (statistics.median(found[name]) for name in (WITHOUT, WITH))
        print(f"{size:>8} {without:>10.1f} {with_schema:>8.1f} {ratio:>6.2f} {low:>7.2f} {high:.2f}")
    print("first token, ms:", *(f"{name} {value:.1f}" for name, value in report["first_token_ms"].items()))
    print("fixed output, tokens/s:", *(f"{name} {value:.1f}" for name, value in report["forced_tokens_per_s"].items()))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured_output.cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    with running_server(ensure("smollm2", args.cache), args.cache, "--dtype", args.dtype) as server:
        report = asyncio.run(measure(server.target, args.rounds))
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
