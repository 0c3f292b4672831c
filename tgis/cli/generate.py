"""`tgis generate`: streams the continuation of a prompt to stdout."""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

from google.protobuf import json_format

from tgis.cli import client
from tgis.errors import OptionError
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.utils.options import Parser, decimal, integer

UINT32 = integer(0, 2**32 - 1)
FLOAT = decimal(0, 1e9)
MORE: dict[str, Any] = {"action": "append", "default": []}
_PENALTIES = {"repetition": FLOAT, "frequency": decimal(-2, 2), "presence": decimal(-2, 2)}
_GUIDED = {
    "json_schema": "JSON that conforms to this schema",
    "regex": "text that this matches as a whole",
    "grammar": "text of this grammar, in EBNF or Lark",
}


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
            _print_stream(call, as_json=options.json)
        except KeyboardInterrupt:
            call.cancel()
            raise
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Continue a prompt; the output is streamed to stdout.")
    parser.add_argument("prompt", nargs="?", help="the prompt (default: all of stdin)")
    parser.add_argument("--json", action="store_true", help="print every message of the stream as a line of JSON")
    client.add_arguments(parser, timeout=None)
    client.add_adapter_arguments(parser)
    stopping = parser.add_argument_group("Stopping")
    most = "maximum number of tokens (default: the server's, 20 if unset)"
    stopping.add_argument("--max-new-tokens", type=UINT32, default=0, metavar="N", help=most)
    stopping.add_argument("--min-new-tokens", type=UINT32, default=0, metavar="N", help="minimum number of tokens")
    stopping.add_argument("--stop", **MORE, metavar="TEXT", help="stop sequence; may be repeated")
    stopping.add_argument("--stop-token-id", type=UINT32, **MORE, metavar="N", help="token that ends the output, too")
    stopping.add_argument("--time-limit", type=decimal(0, 4e6), default=0.0, metavar="X", help="time limit in seconds")
    parser.add_argument("--bad-word", **MORE, metavar="TEXT", help="word that is not generated; may be repeated")
    parser.add_argument("--allow-token-id", type=UINT32, **MORE, metavar="N", help="the only tokens; may be repeated")
    _add_sampling(parser)
    _add_decoding(parser)
    return parser


def _add_sampling(parser: Parser) -> None:
    sampling = parser.add_argument_group("Sampling (default: greedy)")
    sampling.add_argument("--sample", action="store_true", help="sample tokens; implied by each option below")
    sampling.add_argument("--temperature", type=FLOAT, metavar="X", help="below 1 sharpens, above 1 flattens")
    sampling.add_argument("--top-k", type=UINT32, metavar="N", help="sample from the N most likely tokens")
    sampling.add_argument("--top-p", type=FLOAT, metavar="X", help="sample from the most likely tokens that sum to X")
    sampling.add_argument(
        "--typical-p", type=FLOAT, metavar="X", help="sample from the most typical tokens that sum to X"
    )
    sampling.add_argument("--min-p", type=FLOAT, metavar="X", help="sample from tokens X times as likely as the best")
    sampling.add_argument("--seed", type=integer(0, 2**64 - 1), metavar="N", help="the same seed gives the same output")


def _add_decoding(parser: Parser) -> None:
    penalties = parser.add_argument_group("Penalties")
    for name, kind in _PENALTIES.items():
        penalties.add_argument(f"--{name}-penalty", type=kind, metavar="X", help="of tokens that are there already")
    guided = parser.add_argument_group("Structured output", "one of these").add_mutually_exclusive_group()
    guided.add_argument("--choice", action="append", metavar="X", help="one of several texts; repeat it for each")
    for name, text in _GUIDED.items():
        guided.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=text)


def _decoding(options: argparse.Namespace) -> pb.DecodingParameters:
    names = (*_GUIDED, *(f"{name}_penalty" for name in _PENALTIES))
    given = {name: getattr(options, name) for name in names}  # None is absent
    given |= {"bad_words": options.bad_word, "allowed_token_ids": options.allow_token_id}
    return pb.DecodingParameters(**given, choice={"choices": options.choice} if options.choice else None)


def _request(text: str, options: argparse.Namespace) -> pb.SingleGenerationRequest:
    names = ("temperature", "top_k", "top_p", "typical_p", "min_p", "seed")
    drawing = {name: value for name in names if (value := getattr(options, name)) is not None}
    params = pb.Parameters(
        method=pb.SAMPLE if options.sample or drawing else pb.GREEDY,
        sampling=pb.SamplingParameters(**drawing),
        stopping=pb.StoppingCriteria(
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens,
            stop_sequences=options.stop,
            stop_token_ids=options.stop_token_id,
            time_limit_millis=round(options.time_limit * 1000),
        ),
        decoding=_decoding(options),
    )
    return pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text=text),
        params=params,
        adapter_id=options.adapter_id,
        prefix_id=options.prefix_id,
    )


def _print_stream(messages: Iterator[pb.GenerationResponse], *, as_json: bool) -> None:
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
