"""`tgis generate`: streams the continuation of a prompt to stdout."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from tgis.cli import client
from tgis.cli.sampling import NUMBER, UINT32, Add, add_decoding, add_sampling
from tgis.errors import OptionError, StartError, file_errors
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.utils.options import PATH, Parser, decimal
from tgis.utils.private_file import append_line

M = TypeVar("M", bound=Message)


def _milliseconds(text: str) -> int:
    return round(1000 * decimal(0, 4e6)(text))


def main(argv: list[str], prog: str) -> int:
    options = _parser(prog).parse_args(argv)
    try:
        request = _request(client.read_text(options.prompt), options)
    except UnicodeEncodeError as error:
        raise OptionError(f"{error.object!r:.80} is not UTF-8") from error
    with client.open_channel(options) as channel:
        stub = GenerationServiceStub(channel)
        call = stub.GenerateStream(request, timeout=options.timeout, metadata=client.metadata(options))
        try:
            last = _print_stream(call, as_json=options.json)
        except KeyboardInterrupt:
            call.cancel()
            raise
    if options.record and not last.record:
        raise StartError(f"{options.target} makes no records")
    if options.record:
        with file_errors(f"cannot write {options.record}", OptionError):
            append_line(options.record, last.record)
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Continue a prompt; the output is streamed to stdout.")
    parser.add_argument("prompt", nargs="?", help="the prompt (default: all of stdin)")
    parser.add_argument("--json", action="store_true", help="print every message of the stream as a line of JSON")
    parser.add_argument("--record", type=PATH, metavar="FILE", help="append a record of the answer for tgis verify")
    client.add_arguments(parser, timeout=None)
    client.add_adapter_arguments(parser)
    _add_stopping(parser.add_argument_group("Stopping").add_argument)
    add = parser.add_argument_group("Sampling (default: greedy)").add_argument
    add("--sample", action="store_true", help="sample tokens; implied by each option below")
    add_sampling(add)
    add("--typical-p", type=NUMBER, metavar="X", help="sample from the most typical tokens that sum to X; 1 = off")
    add_decoding(parser.add_argument_group("Decoding").add_argument)
    add = parser.add_argument_group("Structured output", "one of these").add_mutually_exclusive_group().add_argument
    add("--choice", dest="choices", action="append", metavar="X", help="one of several texts; repeat it for each")
    add("--json-schema", metavar="X", help="JSON that conforms to this schema")
    add("--regex", metavar="X", help="text that matches this regular expression")
    add("--grammar", metavar="X", help="text of this grammar, in EBNF or Lark")
    return parser


def _add_stopping(add: Add) -> None:
    add(
        "--max-new-tokens",
        type=UINT32,
        metavar="N",
        help="maximum number of new tokens (default: the server's)",
    )
    add("--min-new-tokens", type=UINT32, metavar="N", help="minimum number of new tokens")
    add("--stop", dest="stop_sequences", action="append", metavar="TEXT", help="stop sequence; may be repeated")
    help_text = "token that also ends the output; may be repeated"
    add("--stop-token-id", dest="stop_token_ids", action="append", type=UINT32, metavar="N", help=help_text)
    add("--time-limit", dest="time_limit_millis", type=_milliseconds, metavar="X", help="time limit in seconds")


def _request(text: str, options: argparse.Namespace) -> pb.SingleGenerationRequest:
    sampled, decoding = _from_options(pb.SamplingParameters, options), _from_options(pb.DecodingParameters, options)
    if options.choices:
        decoding.choice.choices.extend(options.choices)
    is_sampled = options.sample or sampled != pb.SamplingParameters()
    return pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=text),
        params=pb.Parameters(
            method=pb.SAMPLE if is_sampled else pb.GREEDY,
            sampling=sampled,
            stopping=_from_options(pb.StoppingCriteria, options),
            decoding=decoding,
            response=pb.ResponseOptions(record=options.record is not None),
        ),
        adapter_id=options.adapter_id,
        prefix_id=options.prefix_id,
    )


def _from_options(kind: type[M], options: argparse.Namespace) -> M:
    """The message whose fields are the options of the same names."""
    given = {name: getattr(options, name, None) for name in kind.DESCRIPTOR.fields_by_name}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _print_stream(messages: Iterator[pb.GenerationResponse], *, as_json: bool) -> pb.GenerationResponse:
    """Print the messages, and return the last one."""
    on_terminal = sys.stdout.isatty() and not as_json
    started = time.monotonic()
    message = pb.GenerationResponse()
    try:
        for message in messages:
            if as_json:
                print(json_format.MessageToJson(message, indent=None))
            else:
                sys.stdout.write(client.terminal_safe(message.text) if on_terminal else message.text)
            sys.stdout.flush()
    finally:
        if on_terminal and message.generated_token_count:
            print()
    if sys.stderr.isatty():
        took = f"{message.generated_token_count} tokens in {time.monotonic() - started:.2f} s"
        print(f"\x1b[2m{took}, {pb.StopReason.Name(message.stop_reason)}\x1b[0m", file=sys.stderr)
    return message
