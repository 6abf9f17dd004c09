"""An in-process OTLP endpoint for tests."""

from __future__ import annotations

from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2


class Collector:
    """Keeps the spans and metric names that it receives."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """Pairs of (service, span)."""
        self.metrics: set[tuple[str, str]] = set()
        """Pairs of (service, metric name)."""

    async def take_spans(self, request: Any, context: object) -> Any:
        for resource in request.resource_spans:
            service = _service(resource)
            for scope in resource.scope_spans:
                self.spans += [(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    async def take_metrics(self, request: Any, context: object) -> Any:
        for resource in request.resource_metrics:
            service = _service(resource)
            for scope in resource.scope_metrics:
                self.metrics |= {(service, metric.name) for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()

    async def serve(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        for name, module, message, handler in (
            ("trace", trace_service_pb2, "Trace", self.take_spans),
            ("metrics", metrics_service_pb2, "Metrics", self.take_metrics),
        ):
            request = getattr(module, f"Export{message}ServiceRequest")
            response = getattr(module, f"Export{message}ServiceResponse")
            export = grpc.unary_unary_rpc_method_handler(
                handler,
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            )
            path = f"opentelemetry.proto.collector.{name}.v1.{message}Service"
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(path, {"Export": export}),)
            )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port


def _service(resource: Any) -> str:
    for attribute in resource.resource.attributes:
        if attribute.key == "service.name":
            return str(attribute.value.string_value)
    return ""
