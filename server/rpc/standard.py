"""The standard gRPC services: health, and server reflection for grpcurl and `buf curl`.

grpcio-reflection supports only v1alpha. v1 differs only in its package name, so the same servicer and
messages serve it. Its descriptor is a renamed copy, so that clients can also describe the v1 service
itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from penstock.server.core.aio import Broadcast
from penstock.server.rpc.boundary import SERVICES

OVERALL = ""
"""The name that asks for the server as a whole."""
V1_SERVICE = "grpc.reflection.v1.ServerReflection"


class Health:
    """SERVING while the server can begin turns.

    Not grpcio-health-checking's servicer: it writes to watchers under the lock that a change of the status
    takes, so one watcher that does not read would hold up the server's end.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        """`is_ready` is called at each `publish`."""
        self._is_ready = is_ready
        self.draining = False
        self._status: health_pb2.HealthCheckResponse.ServingStatus.ValueType = (
            health_pb2.HealthCheckResponse.NOT_SERVING
        )
        self._changed = Broadcast()
        self._names = frozenset((OVERALL, *(service.full_name for service in SERVICES)))

    def add_to(self, server: grpc.aio.Server) -> None:
        # grpcio-health-checking carries no types.
        cast("Any", health_pb2_grpc).add_HealthServicer_to_server(self, server)

    def drain(self) -> None:
        self.draining = True
        self.publish()

    def publish(self) -> None:
        """Report the state to watchers, for every service."""
        ready = self._is_ready() and not self.draining
        states = health_pb2.HealthCheckResponse
        self._status = states.SERVING if ready else states.NOT_SERVING
        self._changed.notify()

    async def Check(  # noqa: N802 - the service's name for it.
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(  # noqa: N802 - the service's name for it.
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Yields the status now, and whenever it has changed."""
        sent = None
        while True:
            known = request.service in self._names
            status = self._status if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status == sent:
                await self._changed.wait()
                continue
            sent = status
            yield health_pb2.HealthCheckResponse(status=status)


def _register_v1() -> None:
    file = descriptor_pb2.FileDescriptorProto()
    alpha: Any = reflection_pb2
    alpha.DESCRIPTOR.CopyToProto(file)
    file.name = "grpc/reflection/v1/reflection.proto"
    text = text_format.MessageToString(file)
    text = text.replace("grpc.reflection.v1alpha", "grpc.reflection.v1")
    renamed = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(renamed.SerializeToString())


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
