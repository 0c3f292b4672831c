"""`tgis tokenize`: shows the tokens of a text."""

import sys

from google.protobuf import json_format

from tgis.cli import client
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.utils.options import Parser


def main(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description="Tokenize a text: one line per token, with its start and end in bytes of UTF-8.",
    )
    parser.add_argument("text", nargs="?", help="the text (default: all of stdin)")
    parser.add_argument("--json", action="store_true", help="print the response as a line of JSON")
    client.add_arguments(parser)
    client.add_adapter_arguments(parser)
    options = parser.parse_args(argv)
    text = client.read_text(options.text)
    request = pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text=text)],
        return_tokens=True,
        return_offsets=True,
        adapter_id=options.adapter_id,
        prefix_id=options.prefix_id,
    )
    with client.open_channel(options) as channel:
        stub = GenerationServiceStub(channel)
        call = stub.Tokenize(request, timeout=options.timeout, metadata=client.metadata(options))
        (response,) = call.responses
    if options.json:
        print(json_format.MessageToJson(response, indent=None))
        return 0
    for token, offset in zip(response.tokens, response.offsets, strict=True):
        print(f"{offset.start:>6} {offset.end:>6}  {client.terminal_safe(token)}")
    print(f"{response.token_count} tokens", file=sys.stderr)
    return 0
