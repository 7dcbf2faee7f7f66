"""Spans of requests for OpenTelemetry, from an optional dependency."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from headstock import CannotRun

NEEDED = "headstock-openai-server[otel]"

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}
"""Path -> the operation's name in OpenTelemetry's conventions for generative AI."""

COUNTS: Mapping[str, str] = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "finish": "gen_ai.response.finish_reasons",
    "ttft_ms": "headstock.time_to_first_token_ms",
    "queue_ms": "headstock.queue_time_ms",
}
"""Field of the access log -> attribute of a span."""


class RequestTracer:
    """Sends a span for each request to the model, as OTLP over HTTP, in the background.

    raises: CannotRun when the libraries are not installed
    """

    # A span is made from the access log's fields when its request has ended: tokens cost nothing.

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            trace = import_module("opentelemetry.trace")
            sdk = import_module("opentelemetry.sdk.trace")
            export = import_module("opentelemetry.sdk.trace.export")
            resources = import_module("opentelemetry.sdk.resources")
            otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            context = import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise CannotRun(
                f"--otlp-endpoint needs the OpenTelemetry SDK: pip install '{NEEDED}'"
            ) from error
        self.model = model
        self.trace = trace
        resource = resources.Resource.create({"service.name": "headstock"})
        self.provider = sdk.TracerProvider(resource=resource)
        self.provider.add_span_processor(
            export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint))
        )
        self.tracer = self.provider.get_tracer("headstock")
        self.propagator = context.TraceContextTextMapPropagator()

    def add_span(
        self, path: str, headers: Mapping[str, str], record: Mapping[str, Any], seconds: float
    ) -> None:
        """Add the span of a request that has ended; `record` is its line in the access log.

        Its parent is the client's `traceparent`.
        """
        operation = OPERATIONS.get(path)
        if operation is None:
            return
        status = record["status"]
        end = int(1e9 * record["time"])
        span = self.tracer.start_span(
            f"{operation} {self.model}",
            context=self.propagator.extract(headers),
            kind=self.trace.SpanKind.SERVER,
            start_time=end - int(1e9 * seconds),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "headstock",
                "gen_ai.request.model": self.model,
                "http.response.status_code": status,
                "headstock.request_id": record["id"],
                **{name: record[key] for key, name in COUNTS.items() if key in record},
            },
        )
        if status >= 500 or "error" in record.get("finish", ()):
            span.set_status(self.trace.StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Send pending spans, for a few seconds at most."""
        self.provider.shutdown()
