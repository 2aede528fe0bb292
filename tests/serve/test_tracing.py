"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.testclient import TestClient

from lockstep.errors import LockstepError
from lockstep.serve.api.tracing import Traced, open_provider
from lockstep.serve.check import check_tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ExportTraceServiceRequest]]:
    """What it got so far."""
    got: list[ExportTraceServiceRequest] = []

    class Take(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            got.append(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *said: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Take) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield got
        server.shutdown()


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def test_every_request_has_a_span(
    knowing: TestClient, collector: list[ExportTraceServiceRequest], caplog: pytest.LogCaptureFixture
) -> None:
    provider = open_provider()
    client = TestClient(Traced(knowing.app, provider.get_tracer("test")))
    client.portal = knowing.portal  # the engine's event loop
    asked = {"model": "tiny", "prompt": [[5, 6, 7], [5, 6]], "max_tokens": 4, "temperature": 0.5, "ignore_eos": True}
    headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    with caplog.at_level("INFO", "lockstep.serve"):
        whole = client.post("/v1/completions", json=asked, headers=headers)
        stream = client.post("/v1/completions", json={**asked, "stream": True})
        client.post("/v1/completions", json={**asked, "temperature": -1})
        client.get("/v1/models/a/b")
        client.get("/nothing")
        client.get("/health")
    provider.shutdown()
    (resource,) = (spans for got in collector for spans in got.resource_spans)
    assert {a.key: plain(a.value) for a in resource.resource.attributes}["service.name"] == "lockstep"
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    told = [{a.key: plain(a.value) for a in span.attributes} for span in spans]
    assert [span.name for span in spans] == [
        *["POST /v1/completions"] * 3, "GET /v1/models/{name:path}", "GET",
    ]  # fmt: skip
    assert [each["http.response.status_code"] for each in told] == [200, 200, 400, 404, 404]
    assert {span.kind for span in spans} == {spans[0].SPAN_KIND_SERVER}
    assert (spans[0].trace_id.hex(), spans[0].parent_span_id.hex()) == (TRACE, PARENT)
    assert not spans[1].parent_span_id
    assert told[0]["gen_ai.response.id"] == whole.json()["id"]
    assert told[1]["gen_ai.response.id"] in stream.text
    assert told[0]["lockstep.request_id"] == "mine"
    for each in told[:2]:
        assert each["gen_ai.request.model"] == "tiny"
        assert each["gen_ai.request.temperature"] == 0.5
        assert each["gen_ai.request.max_tokens"] == 4
        assert each["gen_ai.usage.input_tokens"] == 5
        assert each["gen_ai.usage.output_tokens"] == 8
        assert each["gen_ai.response.finish_reasons"] == ["length", "length"]
        assert 0 < each["gen_ai.latency.time_to_first_token"] < 30
    assert "gen_ai.response.id" not in told[2]
    # The log names the same traces, also where the request came without one.
    lines = [record.getMessage() for record in caplog.records if " is cmpl-" in record.getMessage()]
    assert [f"trace={span.trace_id.hex()} is {each['gen_ai.response.id']}" in line
            for span, each, line in zip(spans[:2], told[:2], lines, strict=True)] == [True, True]  # fmt: skip


def test_without_the_packages_it_is_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing()
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(LockstepError, match=r"pip install 'lockstep\[otel\]'"):
        check_tracing()
