"""`python -m benchmarks.prompts`: how a long prompt delays running streams, and what the prefix cache saves.

Each part starts a new server of SmolLM2. The last line is one JSON object; times in milliseconds.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
from collections.abc import Coroutine
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc.aio

from benchmarks.serving import running_server
from demo.fetch import ensure
from tgis.bench.client import BenchSettings, RequestRecord
from tgis.bench.grpc_client import GrpcClient, connect

_WORDS = tuple("time year people way day man thing woman life child world school state family student group".split())  # noqa: SIM905 - one line is easier to read
_STREAMS, _STREAM_TOKENS = 8, 400
_LONG, _SHARED, _SHARERS = 4000, 1000, 32  # tokens, tokens, requests


class _UniquePrompts:
    """Texts of roughly a given number of tokens (a common word is one), unique by the digits they begin with."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1000)

    def text(self, tokens: int) -> str:
        number = next(self._numbers)
        rng = random.Random(number)
        return " ".join([*str(number), *rng.choices(_WORDS, k=tokens - 4)])


async def _send(client: GrpcClient, text: str, new_tokens: int) -> RequestRecord:
    """Run one stream to its end."""
    sample = RequestRecord(scheduled_at=perf_counter(), requested_tokens=new_tokens)
    await client.send(text, sample)
    assert sample.status == "OK", sample.detail
    return sample


async def _with_client(part: Any, target: str) -> dict[str, float]:
    async with connect(BenchSettings(target=target), lambda: grpc.aio.insecure_channel(target)) as client:
        figures: dict[str, float] = await part(client, _UniquePrompts())
        return figures


async def _long_prompt(client: GrpcClient, prompts: _UniquePrompts) -> dict[str, float]:
    """The longest gap of running streams while a long prompt is computed, relative to their usual step."""

    async def streams() -> list[RequestRecord]:
        return await asyncio.gather(*(_send(client, prompts.text(40), _STREAM_TOKENS) for _ in range(_STREAMS)))

    quiet = await streams()
    running = asyncio.create_task(streams())
    await asyncio.sleep(2.0)  # their own prompts are computed by then
    long = await _send(client, prompts.text(_LONG), 4)
    disturbed = await running
    step = statistics.median(
        (s.last_output_at - s.first_output_at) / (s.output_tokens - s.first_message_tokens) for s in quiet
    )
    return {
        "step_ms": 1e3 * step,
        "longest_gap_ms": 1e3 * max(s.max_gap for s in disturbed),
        "longest_gap_by_step": max(s.max_gap for s in disturbed) / step,
        "quiet_longest_gap_ms": 1e3 * max(s.max_gap for s in quiet),
        "long_prompt_tokens": long.input_tokens,
        "long_prompt_ttft_ms": 1e3 * (long.first_output_at - long.sent_at),
    }


async def _shared_prefix(client: GrpcClient, prompts: _UniquePrompts) -> dict[str, float]:
    """Time to first token of requests that share a prefix: with an empty cache, and with the prefix cached."""
    prefix = prompts.text(_SHARED)

    def sharers() -> list[Coroutine[Any, Any, RequestRecord]]:
        return [_send(client, f"{prefix} {prompts.text(20)}", 8) for _ in range(_SHARERS)]

    figures = {}
    for name in ("empty", "filled"):
        samples = await asyncio.gather(*sharers())
        figures[f"ttft_p50_{name}_ms"] = 1e3 * statistics.median(s.first_output_at - s.sent_at for s in samples)
    return figures


def _run_part(part: Any, model: Path, cache: Path, *options: str) -> dict[str, float]:
    with running_server(model, cache, "--deployment-framework", "tgis_native", *options) as server:
        figures = asyncio.run(_with_client(part, server.target))
    return {name: round(value, 1) for name, value in figures.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prompts", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    args = parser.parse_args(arguments)
    model = ensure("smollm2", args.cache)
    report = {
        "long_prompt": _run_part(_long_prompt, model, args.cache),
        "prefix_cache": _run_part(_shared_prefix, model, args.cache),
        "no_prefix_cache": _run_part(_shared_prefix, model, args.cache, "--prefix-cache", "false"),
    }
    for name, figures in report.items():
        print(name, *(f"{key} {value}" for key, value in figures.items()), sep="\n  ")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
