"""gRPC server reflection under both of its names: grpcio-reflection has only v1alpha; v1 has the same messages."""

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from tgis.api.grpc.servicer import GENERATION_SERVICE
from tgis.pb import generation_pb2

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
SERVICES = (GENERATION_SERVICE, "grpc.health.v1.Health", REFLECTION_V1, "grpc.reflection.v1alpha.ServerReflection")


def add_reflection(server: grpc.aio.Server) -> None:
    """Register reflection for all services of this server."""
    servicer = reflection.aio.ReflectionServicer(SERVICES, _descriptor_pool())  # type: ignore[attr-defined]  # stubs
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers([handler])


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
