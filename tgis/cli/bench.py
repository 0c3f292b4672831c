"""`tgis bench`: the load generator of `tgis.bench`, its options and its output."""

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc.aio
import uvloop

from tgis.bench import grpc_client
from tgis.bench.client import BenchSettings
from tgis.bench.load import ClosedLoop, Level, OpenLoop
from tgis.bench.measure import Report, measure
from tgis.bench.report import dump_line, format_notes, format_table, to_json
from tgis.cli import client
from tgis.errors import OptionError, file_errors
from tgis.utils.options import Parser, ValueType, decimal, integer

DEFAULT_DURATION = 30.0  # seconds of each level
COUNT = integer(1)
AMOUNT = decimal(0, 1e9, exclude_low=True)
Number = TypeVar("Number", int, float)


def main(argv: list[str], prog: str) -> int:
    """Measure. Exit code 0, or 1 if a level had no success; what was measured is shown even when interrupted.

    OptionError for unusable options and files, StartError if the server does not answer.
    """
    args = _parser(prog).parse_args(argv)
    _check(args)
    report = Report(_settings(args))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(report, args))
    except KeyboardInterrupt:
        report.interrupted = True
        _write(report, args)
        raise
    _write(report, args)
    return 0 if all(result.summary().ok for result in report.results) else 1


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Load test a running server: latency and throughput at a given load.")
    _add_load(parser)
    _add_requests(parser)
    client.add_arguments(parser, timeout=600.0)
    client.add_adapter_arguments(parser)
    output = parser.add_argument_group("Output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the report and every request there as JSON")
    output.add_argument("--quiet", action="store_true", help="print only one line of JSON")
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("Load", "several levels, separated by commas, run one after the other")
    kind = load.add_mutually_exclusive_group()
    kind.add_argument(
        "--concurrency", type=_comma_separated(COUNT), metavar="N,...", help="requests in flight at once (default 1)"
    )
    kind.add_argument(
        "--rate",
        type=_comma_separated(AMOUNT),
        metavar="R,...",
        help="requests a second, at random times (Poisson)",
    )
    length = load.add_mutually_exclusive_group()
    length.add_argument("--requests", type=COUNT, metavar="N", help="number of requests of each level")
    length.add_argument(
        "--duration",
        type=AMOUNT,
        metavar="S",
        help=f"seconds for which each level sends requests (default {DEFAULT_DURATION:g})",
    )
    load.add_argument(
        "--warmup", type=integer(0), default=1, metavar="N", help="uncounted requests before each level (default 1)"
    )
    load.add_argument(
        "--server-pid",
        type=integer(1, 1 << 22),
        metavar="PID",
        help="measure the CPU time of this local process",
    )
    load.add_argument(
        "--seed", type=integer(0), default=0, metavar="N", help="seed of prompts and arrival times (default 0)"
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Requests")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument(
        "--prompts", type=Path, metavar="FILE", help='prompts, one a line; in .jsonl the "text" of each line'
    )
    prompt.add_argument(
        "--input-tokens", type=COUNT, default=128, metavar="N", help="length of random prompts (default 128)"
    )
    group.add_argument("--output-tokens", type=COUNT, default=128, metavar="N", help="length of outputs (default 128)")
    group.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let the model end an output")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--stream", action="store_true", default=True, help="stream the outputs (default)")
    kind.add_argument("--unary", dest="stream", action="store_false", help="get each output in one response")


async def _measure(report: Report, args: argparse.Namespace) -> None:
    open_channel = partial(client.make_channel, args.target, args, grpc_client.CHANNEL_OPTIONS, grpc.aio)
    headers = client.metadata(args)
    with client.rpc_errors(args.target, args):
        async with grpc_client.connect(report.settings, open_channel, headers) as connected:
            await measure(report, connected, lambda text: None if args.quiet else print(text, file=sys.stderr))


def _check(args: argparse.Namespace) -> None:
    """OptionError for a file that cannot be written after the run."""
    if args.json:
        with file_errors(f"cannot write {args.json}", OptionError):
            args.json.open("ab").close()


def _write(report: Report, args: argparse.Namespace) -> None:
    if args.json:
        args.json.write_text(dump_line(to_json(report, with_records=True)) + "\n", encoding="utf-8")
    if not args.quiet:
        print(format_table(report), *format_notes(report), sep="\n")
    if args.quiet or not sys.stdout.isatty():
        print(dump_line(to_json(report, with_records=False)))


def _settings(args: argparse.Namespace) -> BenchSettings:
    """The options; most have the names of the fields."""
    duration = args.duration if args.requests or args.duration else DEFAULT_DURATION
    given = {"levels": _levels(args), "duration": duration}
    names = {field.name for field in fields(BenchSettings)}
    return BenchSettings(**{name: value for name, value in vars(args).items() if name in names} | given)


def _levels(args: argparse.Namespace) -> tuple[Level, ...]:
    if args.rate:
        return tuple(OpenLoop(rate, args.seed) for rate in args.rate)
    return tuple(ClosedLoop(concurrency) for concurrency in args.concurrency or [1])


def _comma_separated(parse: ValueType[Number]) -> Callable[[str], list[Number]]:
    return lambda text: [parse(part) for part in text.split(",")]
