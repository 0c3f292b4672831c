"""CPU time of the front-end process per streamed token, at the pace of real engines, and gRPC's share of it.

The fake engine makes one token for every stream in each step. A bare grpc.aio server, which sends prebuilt messages at
the same pace, is the lower bound for any front end on this library. CPU time of one process depends less on what else
runs than tokens/s do, as long as the streams keep up, i.e. there is one message per token.
"""

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from benchmarks.bare_grpc import METHOD
from benchmarks.serving import running_server
from demo.fake_model import make_fake_model
from tgis.bench.measure import cpu_seconds
from tgis.pb import generation_pb2 as pb

LOADS = ((256, 0.020), (64, 0.008))  # streams, seconds of a step
ROUNDS = 3
INPUT_TOKENS, OUTPUT_TOKENS = 32, 250
STREAMS_PER_CONNECTION = 64


@dataclass(frozen=True, slots=True)
class FrontEndReport:
    """Medians of the rounds; messages per token are below 1 where streams did not keep up."""

    streams: int
    step_ms: float
    tgis_us_per_token: float
    tgis_messages_per_token: float
    grpc_us_per_message: float


def measure_front_end(cache: Path, output_tokens: int = OUTPUT_TOKENS) -> list[FrontEndReport]:
    return [_measure(streams, seconds, cache, output_tokens) for streams, seconds in LOADS]


def _measure(streams: int, seconds: float, cache: Path, output_tokens: int) -> FrontEndReport:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = make_fake_model(Path(directory), step_seconds=seconds)
        options = ("--deployment-framework", "fake", "--max-batch-size", str(streams))
        server = stack.enter_context(running_server(model, cache, *options))
        bare = stack.enter_context(bare_server(seconds, output_tokens))
        ours, floor = [], []
        for _ in range(ROUNDS):
            ours.append(_stream_and_time(server.pid, server.target, streams, output_tokens))
            floor.append(_stream_and_time(*bare, streams, output_tokens))
    seconds_of_tokens, num_messages = (statistics.median(values) for values in zip(*ours, strict=True))
    num_tokens = streams * output_tokens
    return FrontEndReport(
        streams,
        seconds * 1000,
        seconds_of_tokens / num_tokens * 1e6,
        num_messages / num_tokens,
        statistics.median(used / messages for used, messages in floor) * 1e6,
    )


def _stream_and_time(pid: int, target: str, streams: int, output_tokens: int) -> tuple[float, int]:
    """CPU seconds of the server, and the number of messages it sent."""
    before = cpu_seconds(pid)
    num_messages = asyncio.run(stream(target, streams, output_tokens))
    return cpu_seconds(pid) - before, num_messages


async def stream(target: str, streams: int, output_tokens: int) -> int:
    """Run concurrent streams; return the number of messages they received."""
    request = pb.SingleGenerationRequest(request=pb.GenerationRequest(text="a" * INPUT_TOKENS))
    request.params.stopping.max_new_tokens = output_tokens
    data, connections = request.SerializeToString(), math.ceil(streams / STREAMS_PER_CONNECTION)
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(target)) for _ in range(connections)]
        calls = [channels[n % connections].unary_stream(METHOD, None, None)(data) for n in range(streams)]
        return sum(await asyncio.gather(*map(_count, calls)))


def _channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])


async def _count(call: "grpc.aio.UnaryStreamCall[bytes, bytes]") -> int:
    count = 0
    async for _ in call:
        count += 1
    return count


@contextlib.contextmanager
def bare_server(step_seconds: float, output_tokens: int) -> Iterator[tuple[int, str]]:
    """Run `benchmarks.bare_grpc`; yield its process and address."""
    command = (sys.executable, "-m", "benchmarks.bare_grpc", str(step_seconds), str(output_tokens))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def print_reports(reports: Sequence[FrontEndReport]) -> None:
    print("us of CPU of the front end per token, and of a bare grpc.aio server per message")
    print(f"{'streams':>8} {'step':>7} {'tgis':>6} {'messages per token':>19} {'grpc.aio':>9}")
    for one in reports:
        ours = f"{one.tgis_us_per_token:>6.1f} {one.tgis_messages_per_token:>19.2f}"
        print(f"{one.streams:>8} {one.step_ms:>4.0f} ms {ours} {one.grpc_us_per_message:>9.1f}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_end", description=__doc__)
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS, metavar="N", help="tokens of each stream")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    args = parser.parse_args(arguments)
    reports = measure_front_end(args.cache, args.output_tokens)
    print_reports(reports)
    print(json.dumps([asdict(report) for report in reports]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
