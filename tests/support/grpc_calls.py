"""What a gRPC port shares with its handlers."""

from typing import Any

from tgis.api.clients import Clients
from tgis.api.grpc.calls import GrpcCalls
from tgis.api.grpc.fair_queue import FairQueue
from tgis.api.grpc.server import max_calls_of_connection
from tgis.config import Config


def make_calls(config: Config) -> GrpcCalls:
    """The calls of a port of its own."""
    queue = FairQueue[Any](max_calls_of_connection(config))
    return GrpcCalls(Clients(config), queue, config.grpc_max_message_bytes)
