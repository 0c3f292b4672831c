"""gRPC server reflection under both of its names: grpcio-reflection has only v1alpha; v1 has the same messages.

v1 is not listed, since no file describes it.
"""

import functools
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tgis.api.grpc.calls import GrpcCalls
from tgis.api.grpc.health import HEALTH_SERVICE
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.servicer import GENERATION_SERVICE
from tgis.api.grpc.status import Context

SERVICES = (GENERATION_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
_NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)
MAX_REQUEST_BYTES = 1024


def reflection_handlers(calls: GrpcCalls) -> "list[grpc.GenericRpcHandler[Any, Any]]":
    """Reflection for all services of this server."""
    reflect_all: Any = reflection.ReflectionServicer(SERVICES).ServerReflectionInfo

    @functools.lru_cache(maxsize=64)  # all clients ask the same
    def answer(data: bytes) -> bytes:
        requests = iter([parse(data, reflection_pb2.ServerReflectionRequest)])
        (response,) = reflect_all(requests, None)
        serialized: bytes = response.SerializeToString()
        return serialized

    async def reflect(_requests: object, context: Context) -> None:
        async with calls.open(context, "ServerReflectionInfo") as call:
            while (data := await call.next_message(MAX_REQUEST_BYTES)) is not None:
                await call.write(answer(data))

    methods = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(reflect)}
    return [grpc.method_handlers_generic_handler(name, methods) for name in _NAMES]
