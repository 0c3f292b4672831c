"""`tgis model-info`: shows the kind of the model and its limits."""

from google.protobuf import json_format

from tgis.cli import client
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.utils.options import Parser


def main(argv: list[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Show the kind of the model and its limits in tokens.")
    parser.add_argument("--json", action="store_true", help="print the response as a line of JSON")
    client.add_arguments(parser)
    options = parser.parse_args(argv)
    with client.open_channel(options) as channel:
        stub = GenerationServiceStub(channel)
        info = stub.ModelInfo(pb.ModelInfoRequest(), timeout=options.timeout, metadata=client.metadata(options))
    if options.json:
        print(json_format.MessageToJson(info, indent=None))
        return 0
    print(f"model_kind           {pb.ModelInfoResponse.ModelKind.Name(info.model_kind)}")
    print(f"max_sequence_length  {info.max_sequence_length}")
    print(f"max_new_tokens       {info.max_new_tokens}")
    return 0
