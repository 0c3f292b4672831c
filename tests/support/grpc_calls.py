"""What a gRPC port shares with its handlers."""

from tgis.api.clients import Clients
from tgis.api.grpc.calls import GrpcCalls
from tgis.config import Config


def make_calls(config: Config) -> GrpcCalls:
    """The calls of a port of its own."""
    return GrpcCalls(Clients(config), config)
