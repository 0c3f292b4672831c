"""gRPC server reflection under both of its names: grpcio-reflection has only v1alpha; v1 has the same messages."""

import functools
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tgis.api.grpc.calls import GrpcCalls
from tgis.api.grpc.health import HEALTH_SERVICE
from tgis.api.grpc.parsing import parse
from tgis.api.grpc.servicer import GENERATION_SERVICE
from tgis.api.grpc.status import Context, error_boundary
from tgis.pb import generation_pb2

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
REFLECTION_V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"
SERVICES = (GENERATION_SERVICE, HEALTH_SERVICE, REFLECTION_V1, REFLECTION_V1ALPHA)
MAX_REQUEST_BYTES = 1024


def reflection_handlers(calls: GrpcCalls) -> "list[grpc.GenericRpcHandler[Any, Any]]":
    """Reflection for all services of this server."""
    reflect_all: Any = reflection.ReflectionServicer(SERVICES, _descriptor_pool()).ServerReflectionInfo

    @functools.lru_cache(maxsize=64)  # all clients ask the same
    def answer(data: bytes) -> bytes:
        requests = iter([parse(data, reflection_pb2.ServerReflectionRequest)])
        (response,) = reflect_all(requests, None)
        serialized: bytes = response.SerializeToString()
        return serialized

    async def reflect(_requests: object, context: Context) -> None:
        async with error_boundary(context):
            with calls.open(context) as call:
                while (data := await call.next_message(MAX_REQUEST_BYTES)) is not None:
                    await call.write(answer(data))

    methods = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(reflect)}
    return [grpc.method_handlers_generic_handler(name, methods) for name in (REFLECTION_V1, REFLECTION_V1ALPHA)]


def _descriptor_pool() -> descriptor_pool.DescriptorPool:
    """Only the protos of SERVICES; the default pool would also expose whatever else is imported."""
    v1alpha = _file_proto(reflection_pb2.DESCRIPTOR)
    v1 = json_format.MessageToJson(v1alpha).replace("v1alpha", "v1")
    pool = descriptor_pool.DescriptorPool()
    for file in (_file_proto(generation_pb2.DESCRIPTOR), _file_proto(health_pb2.DESCRIPTOR), v1alpha):
        pool.Add(file)
    pool.Add(json_format.Parse(v1, descriptor_pb2.FileDescriptorProto()))
    return pool


def _file_proto(descriptor: FileDescriptor) -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto()
    descriptor.CopyToProto(file)
    return file
