"""Prometheus metrics: vLLM's names for the metrics that vLLM has, the prefix `entropic_` for others."""

import math
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..engine.interface import Delta, Engine, EngineRequest

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS = tuple(float(2**n) for n in range(18))
NATS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
TEMPERATURES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
COSTS = tuple(10.0**n for n in range(-8, 1))
# Metrics from the engine's snapshot: key, name, description.
GAUGES = (
    ("running", "num_requests_running", "Sequences that run."),
    ("waiting", "num_requests_waiting", "Sequences that wait."),
    ("kv_usage", "kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it."),
)
COUNTERS = (
    ("preemptions", "num_preemptions", "Sequences that lost their pages to others."),
    ("prefix_queries", "prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ("prefix_hits", "prefix_cache_hits", "Tokens found in the prefix cache."),
    ("num_drafts", "spec_decode_num_drafts", "Verifications of drafted tokens, by sequence and pass."),
    ("num_draft_tokens", "spec_decode_num_draft_tokens", "Drafted tokens that were verified."),
    ("num_accepted_tokens", "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."),
)
ENTROPIC_COUNTERS = (
    ("compilations", "compilations_after_warmup", "Programs compiled after warm-up; each made someone wait."),
    ("explored", "explorations", "Times that a sequence branched."),
    ("looked", "lookaheads", "Times that a sequence compared candidates one step ahead."),
    ("returned", "rollbacks", "Times that a sequence took tokens back."),
    ("discarded", "discarded_tokens", "Tokens that were computed and are in no text."),
)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine, model: str, prefix: str = "vllm") -> None:
        """Metrics without observations.

        Args:
            engine: Its snapshot is read at each scrape.
            model: Value of the label `model_name`.
            prefix: The prefix of the metrics that vLLM has, before a colon.
        """
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model, prefix))
        label = {"labelnames": ["model_name"], "registry": self.registry}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, **label).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, **label).labels(model)

        namespace = f"{prefix}:"
        self.prompt_tokens = counter(f"{namespace}prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = counter(f"{namespace}generation_tokens", "Tokens generated.")
        self.first = histogram(
            f"{namespace}time_to_first_token_seconds", "From a request to its first token.", LATENCY
        )
        self.between = histogram(
            f"{namespace}inter_token_latency_seconds", "From a token to the next.", BETWEEN
        )
        self.e2e = histogram(f"{namespace}e2e_request_latency_seconds", "From a request to its end.", LATENCY)
        self.queue = histogram(
            f"{namespace}request_queue_time_seconds", "What a request waits before it runs.", LATENCY
        )
        self.prefill = histogram(f"{namespace}request_prefill_time_seconds", "Reading a prompt.", LATENCY)
        self.prompt_length = histogram(f"{namespace}request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.text_length = histogram(
            f"{namespace}request_generation_tokens", "Tokens generated for a request.", TOKENS
        )
        reasons = Counter(
            f"{namespace}request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.ended = {
            reason: reasons.labels(model, reason) for reason in ("stop", "length", "abort", "error")
        }
        self.refusals = counter("entropic_refused_requests", "Requests that found the queue full.")
        self.rate_limited = counter(
            "entropic_rate_limited_requests", "Requests above the rate of their API key."
        )
        self.timeouts = counter("entropic_timed_out_requests", "Requests that took longer than allowed.")
        self.entropy = histogram("entropic_entropy_nats", "Entropy of the belief at each token.", NATS)
        self.temperature = histogram("entropic_temperature", "Temperature of each token.", TEMPERATURES)
        self.kept = histogram("entropic_kept_fraction", "Share of the KV pages that a token read.", SHARES)
        self.time = counter("entropic_time_nats", "Entropic time; its rate is nats resolved a second.")
        self.cost = histogram("entropic_token_cost_seconds", "Roofline cost of a token.", COSTS)

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return exposition.generate_latest(self.registry)

    def watch(self, engine_request: EngineRequest) -> "Watch":
        """Start measuring an engine request."""
        return Watch(self, engine_request)

    def refused(self) -> None:
        """Count a request that found the queue full."""
        self.refusals.inc()

    def limited(self) -> None:
        """Count a request above the rate limit of its client."""
        self.rate_limited.inc()

    def abandoned(self) -> None:
        """Count an engine request whose client has disconnected."""
        self.ended["abort"].inc()


class Watch:
    """Measures an engine request from its creation to its end."""

    def __init__(self, metrics: Metrics, engine_request: EngineRequest) -> None:
        self.metrics, self.engine_request = metrics, engine_request
        self.start = time.perf_counter()
        self.latest: float | None = None
        self.tokens = 0
        self.ended = False

    def note(self, delta: Delta) -> None:
        """Record a delta."""
        m, timestamp = self.metrics, time.perf_counter()
        if delta.tokens:
            count = len(delta.tokens)
            if self.latest is None:
                m.first.observe(timestamp - self.start)
            else:
                for _ in range(count):
                    m.between.observe((timestamp - self.latest) / count)
            self.latest = timestamp
            self.tokens += count
            m.generation_tokens.inc(count)
            for token in delta.tokens:
                for histogram, name in (
                    (m.entropy, "entropy"),
                    (m.temperature, "temperature"),
                    (m.kept, "kept_fraction"),
                    (m.cost, "cost"),
                ):
                    value = token.metrics.get(name)
                    if value is not None and math.isfinite(value):
                        histogram.observe(value)
        if delta.finish_reason is not None:
            self._end(delta, timestamp)

    def _end(self, delta: Delta, timestamp: float) -> None:
        m, self.ended = self.metrics, True
        m.e2e.observe(timestamp - self.start)
        m.ended[delta.finish_reason or "error"].inc()
        m.timeouts.inc(delta.timed_out)
        if delta.usage is not None:
            m.prompt_tokens.inc(delta.usage.prompt_tokens)
            m.prompt_length.observe(delta.usage.prompt_tokens)
        m.text_length.observe(self.tokens)
        m.time.inc(max(0.0, delta.summary.get("entropic_time", 0.0)))
        for histogram, name in ((m.queue, "queue_time"), (m.prefill, "prefill_time")):
            if (value := delta.summary.get(name)) is not None:
                histogram.observe(value)


class EngineCollector(Collector):
    """Metrics from the engine's snapshot, read at each scrape."""

    def __init__(self, engine: Engine, model: str, prefix: str) -> None:
        """A collector for one engine.

        Args:
            engine: Its snapshot is read at each scrape.
            model: Value of the label `model_name`.
            prefix: The prefix of the metrics that vLLM has, before a colon.
        """
        self.engine, self.model, self.prefix = engine, model, prefix

    def collect(self) -> Iterator[Any]:
        """The metric families of the engine."""
        snapshot = self.engine.snapshot()
        for key, name, text in GAUGES:
            yield self._family(GaugeMetricFamily, f"{self.prefix}:{name}", text, snapshot.get(key, 0))
        for key, name, text in COUNTERS:
            yield self._family(CounterMetricFamily, f"{self.prefix}:{name}", text, snapshot.get(key, 0))
        for key, name, text in ENTROPIC_COUNTERS:
            yield self._family(CounterMetricFamily, f"entropic_{name}", text, snapshot.get(key, 0))
        yield self._family(
            GaugeMetricFamily, "entropic_ready", "Whether the warm-up is over.", self.engine.ready()
        )

    def _family(self, family: type, name: str, text: str, value: float) -> Any:
        metric = family(name, text, labels=["model_name"])
        metric.add_metric([self.model], float(value))
        return metric
