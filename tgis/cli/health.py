"""`tgis health`: the standard gRPC health check as a command, for probes."""

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tgis.cli import client
from tgis.utils.options import TEXT, Parser

SERVICE = "fmaas.GenerationService"


def main(argv: list[str], prog: str) -> int:
    """Return 0 if the service is SERVING, else 1."""
    parser = Parser(prog=prog, description="Check the server with grpc.health.v1: exit code 0 if it is ready, else 1.")
    parser.add_argument(
        "--service",
        type=TEXT,
        default=SERVICE,
        metavar="NAME",
        help=f"service to check; '' is the whole server (default: {SERVICE})",
    )
    client.add_arguments(parser, timeout=5.0)
    options = parser.parse_args(argv)
    request = health_pb2.HealthCheckRequest(service=options.service)
    with client.open_channel(options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(request, timeout=options.timeout, metadata=client.metadata(options)).status
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(status))
    return 0 if status == health_pb2.HealthCheckResponse.SERVING else 1
