"""The standard gRPC health service: SERVING while the server can begin turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from penstock.server.rpc.boundary import SERVICES


class Health:
    def __init__(self, is_ready: Callable[[], bool]) -> None:
        """`is_ready` is called at each `publish`."""
        self._is_ready = is_ready
        self.draining = False
        # grpcio-health-checking carries no types.
        self._servicer: Any = cast("Any", health).aio.HealthServicer()

    def add_to(self, server: grpc.aio.Server) -> None:
        cast("Any", health_pb2_grpc).add_HealthServicer_to_server(self._servicer, server)

    async def drain(self) -> None:
        self.draining = True
        await self.publish()

    async def publish(self) -> None:
        """Report the state to watchers, for every service."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if self._is_ready() and not self.draining
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in (health.OVERALL_HEALTH, *(service.full_name for service in SERVICES)):
            await self._servicer.set(name, status)
