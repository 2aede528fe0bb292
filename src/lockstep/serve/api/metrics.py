"""Prometheus metrics, under the names of vLLM's dashboards where they mean the same."""

from __future__ import annotations

import time
from collections import Counter as Sums
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from lockstep.serve.params import Output
from lockstep.serve.replicas import Replicas
from lockstep.serve.state import Stats

_NOTHING = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""While there is no engine."""
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counts what the server does. One registry per application, so that two can live in one process."""

    def __init__(self, engine: Replicas, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of accepted requests.")
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._queried = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.")
        self._success = Counter(
            "vllm:request_success", "Finished choices.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From the request to its first output.")
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Between two outputs, per token.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From the request to its end.")
        self._asked = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answered = self._histogram("vllm:request_generation_tokens", "Tokens of a finished choice.", _TOKENS)
        self._registry.register(_EngineState(engine, model_name))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def watch(self, prompt_tokens: int) -> Watch:
        """A request was accepted: its watch takes each of its outputs."""
        self._prompt.inc(prompt_tokens)
        self._asked.observe(prompt_tokens)
        return Watch(self, prompt_tokens)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(name, about, ["model_name"], registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, about: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        return Histogram(name, about, ["model_name"], registry=self._registry, buckets=buckets).labels(**self._labels)

    def _finished(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()


class Watch:
    """Times one request."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics, self._prompt = metrics, prompt_tokens
        self._begin = time.perf_counter()
        self._last: dict[int, float] = {}
        self._tokens: Sums[int] = Sums()
        """Generated, by choice."""

    def output(self, output: Output) -> None:
        metrics, now, tokens = self._metrics, time.perf_counter(), len(output.token_ids)
        metrics._generated.inc(tokens)
        self._tokens[output.choice] += tokens
        if output.choice in self._last:
            for _ in range(tokens):
                metrics._between.observe((now - self._last[output.choice]) / tokens)
        else:
            metrics._first.observe(now - self._begin)
            metrics._queried.inc(self._prompt)
            metrics._hits.inc(output.cached_tokens)
        self._last[output.choice] = now
        if output.finish_reason is not None:
            metrics._finished(output.finish_reason)
            metrics._answered.observe(self._tokens[output.choice])
            metrics._whole.observe(now - self._begin)


class _EngineState(Collector):
    """Gauges read from the engine at the moment they are asked for."""

    def __init__(self, engine: Replicas, model_name: str) -> None:
        self._engine, self._labels = engine, [model_name]

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._engine.stats or _NOTHING
        gauges = (
            ("vllm:num_requests_running", "Sequences in the batch.", stats.running),
            ("vllm:num_requests_waiting", "Sequences in the queue.", stats.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Used part of the KV pages, 0 to 1.",
                stats.pages_used / max(1, stats.pages_total),
            ),
            ("lockstep:replicas_ready", "Engines that take requests.", self._engine.serving),
            ("lockstep:kv_pages_total", "KV pages.", stats.pages_total),
            ("lockstep:kv_pages_used", "KV pages that running sequences read.", stats.pages_used),
            ("lockstep:kv_pages_cached", "KV pages kept for prefixes to come.", stats.pages_cached),
        )
        counters = (
            ("vllm:num_preemptions", "Sequences that lost their pages for a while.", stats.preemptions),
            ("vllm:spec_decode_num_draft_tokens", "Tokens guessed for speculative decoding.", stats.guessed_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Guesses that were right.", stats.right_guesses),
            ("lockstep:engine_starts", "How often the engine's process became ready.", self._engine.starts),
            ("lockstep:engine_steps", "Forward passes.", stats.steps),
            ("lockstep:computed_tokens", "Tokens that went through the model.", stats.computed_tokens),
        )
        for name, about, value in gauges:
            family = GaugeMetricFamily(name, about, labels=["model_name"])
            family.add_metric(self._labels, value)
            yield family
        for name, about, value in counters:
            counter = CounterMetricFamily(name, about, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter
