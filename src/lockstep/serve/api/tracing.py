"""A span for each request, by OpenTelemetry, where `serve.otel` asks for it. Plain ASGI.

Where spans go, and which of them, is said as everywhere, by the variables of OpenTelemetry's specification
(https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/). Names of attributes are those of
its semantic conventions for HTTP servers and generative models; vLLM's for what these do not name.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.serve.api.gate import OPEN_PATHS
from lockstep.serve.params import Output, SamplingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer


def open_provider() -> TracerProvider:
    """What makes spans, and sends them in batches by OTLP over HTTP from its own thread. `shutdown` sends the rest.

    `check_tracing` has found the packages.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "lockstep"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Traced:
    """Stands before the gate: what it refuses has a span too. Probes and the files of the page have none.

    A request that belongs to a trace (W3C `traceparent`) continues it; what is behind this sees every request with the
    header of its own span, so that the log names its trace, and the span itself as `request.state.span`.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app, self._tracer, self._w3c = app, tracer, TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        headers = Headers(scope=scope)
        came = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        span = self._tracer.start_span(scope["method"], self._w3c.extract(came), SpanKind.SERVER, attributes)
        own: dict[str, str] = {}
        self._w3c.inject(own, set_span_in_context(span))
        scope["headers"] = [
            *((name, value) for name, value in scope["headers"] if name not in (b"traceparent", b"tracestate")),
            *((name.encode(), value.encode()) for name, value in own.items()),
        ]
        scope.setdefault("state", {})["span"] = span

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                span.set_attribute("lockstep.request_id", Headers(raw=message["headers"]).get("x-request-id", ""))
                if message["status"] >= 500:
                    span.set_status(StatusCode.ERROR)
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception as error:
            span.record_exception(error)
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            if (route := scope.get("route")) is not None:
                span.update_name(f"{scope['method']} {route.path}")
                span.set_attribute("http.route", route.path)
            span.end()


class Generation:
    """What a request's span tells of the tokens that were made for it."""

    def __init__(self, span: Span, model: str, identity: str, prompts: list[list[int]], params: SamplingParams) -> None:
        self._span, self._began = span, time.perf_counter()
        self._outputs = self._cached = 0
        self._reasons: list[str] = []
        asked: dict[str, Any] = {
            "gen_ai.request.model": model, "gen_ai.response.model": model, "gen_ai.response.id": identity,
            "gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens, "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": sum(map(len, prompts)),
        }  # fmt: skip
        span.set_attributes({name: value for name, value in asked.items() if value is not None})

    def output(self, output: Output) -> None:
        if not self._outputs and output.token_ids:
            self._span.set_attribute("gen_ai.latency.time_to_first_token", time.perf_counter() - self._began)
        self._outputs += len(output.token_ids)
        if output.finish_reason is not None:
            self._reasons.append(output.finish_reason)
            self._cached += output.cached_tokens if output.choice == 0 else 0

    def end(self) -> None:
        """Also where the client has left: with what there was until then."""
        self._span.set_attributes({
            "gen_ai.usage.output_tokens": self._outputs, "gen_ai.usage.cache_read.input_tokens": self._cached,
            "gen_ai.response.finish_reasons": self._reasons,
        })  # fmt: skip
