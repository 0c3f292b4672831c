"""`tgis tokenize`, `tgis model-info`, `tgis health` and `grpc_healthcheck`: one call to a running server each."""

import sys

from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tgis.cli import client
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.utils.options import TEXT, Parser

SERVICE = "fmaas.GenerationService"
_FLAGS_OF_PROBE = {"--server-url": "--target", "--service-name": "--service", "--secure": "--tls"}


def tokenize(argv: list[str], prog: str) -> int:
    """Show the tokens of a text."""
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
    end, data = 0, text.encode()
    for token, offset in zip(response.tokens, response.offsets, strict=True):
        # With the space before it, which offsets may leave out; a token that is part of a character, as all of it.
        shown = data[min(end, offset.start) : offset.end] if offset.end > end else data[offset.start : offset.end]
        end = max(end, offset.end)
        line = shown.decode(errors="replace").replace("\n", "\\n").replace("\t", "\\t") or token
        print(f"{offset.start:>6} {offset.end:>6}  {client.terminal_safe(line)}")
    print(f"{response.token_count} tokens", file=sys.stderr)
    return 0


def model_info(argv: list[str], prog: str) -> int:
    """Show the kind of the model and its limits."""
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
    print(f"fingerprint          {info.fingerprint}")
    return 0


def health(argv: list[str], prog: str) -> int:
    """The standard gRPC health check as a command, for probes: 0 if the service is SERVING, else 1."""
    parser = Parser(prog=prog, description="Check the server with grpc.health.v1: exit code 0 if it is ready, else 1.")
    help_text = f"service to check; '' is the whole server (default: {SERVICE})"
    parser.add_argument("--service", type=TEXT, default=SERVICE, metavar="NAME", help=help_text)
    client.add_arguments(parser, timeout=5.0)
    options = parser.parse_args(argv)
    request = health_pb2.HealthCheckRequest(service=options.service)
    with client.open_channel(options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(request, timeout=options.timeout, metadata=client.metadata(options)).status
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1


def grpc_healthcheck(argv: list[str], prog: str) -> int:
    """The probe of vllm-tgis-adapter: `health` with other names of flags and a timeout of a second."""
    renamed = ["--timeout=1"]
    for argument in argv:
        flag, equals, value = argument.partition("=")
        if flag != "--insecure":  # the default of `health`
            renamed.append(_FLAGS_OF_PROBE.get(flag, flag) + equals + value)
    return health(renamed, prog)
