"""Tracing across processes: W3C trace context in gRPC metadata, spans through the OpenTelemetry API.

Without an SDK, or without `OTEL_EXPORTER_OTLP_ENDPOINT`, every span here is a no-op.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context

Metadata = tuple[tuple[str, str], ...]


def configure(service_name: str) -> bool:
    """Exports this process's traces and metrics by OTLP if the environment names an endpoint.

    Returns whether it exports. Raises ImportError if an endpoint is named but the SDK or its exporter is
    not installed: otherwise traces would be lost silently.
    """
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return False
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service_name)
    resource = Resource.create({"service.name": name})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(tracers)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    metrics.set_meter_provider(MeterProvider(resource=resource, metric_readers=[reader]))
    return True


def shutdown() -> None:
    """Flushes buffered traces and metrics. Safe without an SDK."""
    for provider in (trace.get_tracer_provider(), metrics.get_meter_provider()):
        stop = getattr(provider, "shutdown", None)
        if stop is not None:
            stop()


def outgoing() -> Metadata:
    """The current trace context as metadata for a call."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


def incoming(metadata: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's trace context, from the metadata of its call."""
    return propagate.extract({k: v for k, v in metadata or () if isinstance(v, str)})


def traceparent(context: Context | None = None) -> str:
    """`context` (or the current one) as a W3C traceparent; empty if there is no trace."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context)
    return carrier.get("traceparent", "")


def from_traceparent(value: str) -> Context:
    """The context that a traceparent names; an empty context if it is empty or malformed."""
    carrier: Mapping[str, str] = {"traceparent": value} if value else {}
    return propagate.extract(carrier, Context())
