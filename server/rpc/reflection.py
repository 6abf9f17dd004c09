"""Server reflection, v1 and v1alpha, so that grpcurl and `buf curl` can list, describe and call.

grpcio-reflection supports only v1alpha. The two protocols differ only in their package name, so the
same servicer and messages serve v1. Its descriptor is a renamed copy, so that clients can also
describe the v1 service itself.
"""

from __future__ import annotations

from typing import Any, cast

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from penstock.server.rpc.boundary import SERVICES

V1_SERVICE = "grpc.reflection.v1.ServerReflection"


def _register_v1() -> None:
    file = descriptor_pb2.FileDescriptorProto()
    alpha: Any = reflection_pb2
    alpha.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = "grpc.reflection.v1"
    old, new = ".grpc.reflection.v1alpha.", ".grpc.reflection.v1."
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(old, new)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new)
            method.output_type = method.output_type.replace(old, new)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())


_register_v1()


def add_reflection(server: grpc.aio.Server) -> None:
    names = [
        *(service.full_name for service in SERVICES),
        health.SERVICE_NAME,
        reflection.SERVICE_NAME,
        V1_SERVICE,
    ]
    servicer = ReflectionServicer(names)
    messages: Any = reflection_pb2
    handler = grpc.stream_stream_rpc_method_handler(
        cast("Any", servicer).ServerReflectionInfo,
        request_deserializer=messages.ServerReflectionRequest.FromString,
        response_serializer=messages.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in (reflection.SERVICE_NAME, V1_SERVICE)
        )
    )
