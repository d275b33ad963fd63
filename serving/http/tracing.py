"""OpenTelemetry traces of requests, with the extra `tracing` and an OTLP endpoint."""

from collections.abc import Mapping
from typing import Any

from ..request import RequestError

OFF: Mapping[str, Any] = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}


def exporter(endpoint: str | None) -> Any:
    """A provider of tracers that sends spans to an OTLP endpoint over HTTP; None without one."""
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise RequestError(
            f"--otlp-traces-endpoint needs {error.name}: pip install 'entropic_jax[tracing]'; got {endpoint}"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "entropic_jax"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


def of_requests(provider: Any) -> Any:
    """FastAPI's tracing arguments: a span per request, with the parent that `traceparent` names, or none."""
    return {**OFF, "tracing": provider is not None, "tracer_provider": provider}


def note(**attributes: Any) -> None:
    """Add attributes to the span of the current request, if there is one."""
    from opentelemetry import trace

    span = trace.get_current_span()
    if span.is_recording():
        span.set_attributes({name: value for name, value in attributes.items() if value is not None})
