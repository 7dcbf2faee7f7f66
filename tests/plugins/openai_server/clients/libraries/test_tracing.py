"""Spans of requests arrive at a collector as OpenTelemetry's own protocol."""

from __future__ import annotations

import gzip
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from served import serve

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@contextmanager
def collect() -> Iterator[tuple[str, list[Any]]]:
    """A collector's address, and the spans that it gets."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{collector.server_port}/v1/traces", spans
        collector.shutdown()
        thread.join()


@pytest.mark.feature("W12")
def test_each_request_has_a_span_below_its_clients() -> None:
    with collect() as (address, spans):
        flags = ("--num-pages", "64", "--otlp-endpoint", address)
        with serve(*flags, faults=("nan@6:0",)) as server:
            body = {"prompt": [5] * 8, "max_tokens": 3, "ignore_eos": True}
            header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            assert server.post("/v1/completions", body, headers=header).status == 200
            assert server.post("/v1/chat/completions", {"messages": []}).status == 400
            assert server.post("/v1/responses", {"input": "a", "stream": True}).status == 200
            server.get("/version")
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        assert len(spans) == 3
    first, second, third = sorted(spans, key=lambda span: span.start_time_unix_nano)
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert first.name == "text_completion demo" and second.name == "chat demo"
    facts = {each.key: each.value for each in first.attributes}
    assert facts["gen_ai.usage.input_tokens"].int_value == 8
    assert facts["gen_ai.usage.output_tokens"].int_value == 3
    assert facts["gen_ai.request.model"].string_value == "demo"
    assert facts["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert 0 < first.end_time_unix_nano - first.start_time_unix_nano < 60e9
    (status,) = (each.value for each in second.attributes if each.key.endswith("status_code"))
    assert status.int_value == 400 and not second.parent_span_id
    assert third.name == "chat demo"
    # A stream that its engine failed has begun with 200.
    assert third.status.code == Status.STATUS_CODE_ERROR != first.status.code
