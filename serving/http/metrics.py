"""Prometheus metrics: vLLM's names for the metrics that vLLM has, the prefix `entropic_` for others."""

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..engine.interface import Delta, Engine, OutputStream

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
    (
        "compilations",
        "compilations_after_warmup",
        "Programs compiled after warm-up; requests waited, or had a slower one.",
    ),
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
            engine: its snapshot is read at each scrape.
            model: value of the label `model_name`.
            prefix: the prefix of the metrics that vLLM has, before a colon.
        """
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model, prefix))
        named = {"labelnames": ["model_name"], "registry": self.registry}
        refused = Counter("entropic_refused_requests", "Requests that found the queue full.", **named)
        limited = Counter(
            "entropic_rate_limited_requests", "Requests above the rate of their API key.", **named
        )
        self.refusals, self.rate_limited = refused.labels(model), limited.labels(model)
        families = request_metrics(f"{prefix}:", self.registry)
        self.engines = [RequestMetrics(families, model, str(rank)) for rank in range(engine.ranks)]

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return exposition.generate_latest(self.registry)

    def watch(self, output_stream: OutputStream) -> "Watch":
        """Start measuring an engine request."""
        return Watch(self.engines[output_stream.rank])

    def refused(self) -> None:
        """Count a request that found the queue full."""
        self.refusals.inc()

    def limited(self) -> None:
        """Count a request above the rate limit of its client."""
        self.rate_limited.inc()

    def abandoned(self, output_stream: OutputStream) -> None:
        """Count an engine request whose client has disconnected."""
        self.engines[output_stream.rank].ended["abort"].inc()


def request_metrics(namespace: str, registry: CollectorRegistry) -> dict[str, Any]:
    """The families of what is measured at each request, by their name in `RequestMetrics`.

    Args:
        namespace: before the names that vLLM has.
        registry: the registry that the families belong to.
    """
    label: dict[str, Any] = {"labelnames": ["model_name", "engine"], "registry": registry}

    def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, **label)

    return {
        "prompt_tokens": Counter(f"{namespace}prompt_tokens", "Tokens of prompts.", **label),
        "generation_tokens": Counter(f"{namespace}generation_tokens", "Tokens generated.", **label),
        "first": histogram(
            f"{namespace}time_to_first_token_seconds", "From a request to its first token.", LATENCY
        ),
        "between": histogram(f"{namespace}inter_token_latency_seconds", "From a token to the next.", BETWEEN),
        "e2e": histogram(f"{namespace}e2e_request_latency_seconds", "From a request to its end.", LATENCY),
        "queue": histogram(
            f"{namespace}request_queue_time_seconds", "What a request waits before it runs.", LATENCY
        ),
        "prefill": histogram(f"{namespace}request_prefill_time_seconds", "Prefill of a prompt.", LATENCY),
        "prompt_length": histogram(f"{namespace}request_prompt_tokens", "Tokens of a prompt.", TOKENS),
        "text_length": histogram(
            f"{namespace}request_generation_tokens", "Tokens generated for a request.", TOKENS
        ),
        "ended": Counter(
            f"{namespace}request_success",
            "Requests that ended, by reason.",
            ["model_name", "engine", "finished_reason"],
            registry=registry,
        ),
        "timeouts": Counter(
            "entropic_timed_out_requests", "Requests that took longer than allowed.", **label
        ),
        "entropy": histogram("entropic_entropy_nats", "Entropy of the belief at each token.", NATS),
        "temperature": histogram("entropic_temperature", "Temperature of each token.", TEMPERATURES),
        "kept": histogram("entropic_kept_fraction", "Share of the KV pages that a token read.", SHARES),
        "time": Counter("entropic_time_nats", "Entropic time; its rate is nats resolved a second.", **label),
        "cost": histogram("entropic_token_cost_seconds", "Roofline cost of a token.", COSTS),
    }


class RequestMetrics:
    """Metrics of each request of one engine, by the names of `request_metrics`."""

    def __init__(self, families: dict[str, Any], model: str, engine: str) -> None:
        """The series of one engine.

        Args:
            families: from `request_metrics`.
            model: value of the label `model_name`.
            engine: value of the label `engine`.
        """
        self.ended = {
            reason: families["ended"].labels(model, engine, reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self._series = {
            name: family.labels(model, engine) for name, family in families.items() if name != "ended"
        }

    def __getattr__(self, name: str) -> Any:
        """The series of a name."""
        return self._series[name]


class Watch:
    """Measures an engine request from its creation to its end."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self.metrics = metrics
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
            engine: its snapshot is read at each scrape.
            model: value of the label `model_name`.
            prefix: the prefix of the metrics that vLLM has, before a colon.
        """
        self.engine, self.model, self.prefix = engine, model, prefix

    def collect(self) -> Iterator[Any]:
        """The metric families of the engine, with a series for each data-parallel one."""
        snapshot = self.engine.snapshot()
        parts = snapshot.get("engines") or [{**snapshot, "ready": self.engine.ready()}]
        for key, name, text in GAUGES:
            yield self._family(GaugeMetricFamily, f"{self.prefix}:{name}", text, key, parts)
        for key, name, text in COUNTERS:
            yield self._family(CounterMetricFamily, f"{self.prefix}:{name}", text, key, parts)
        for key, name, text in ENTROPIC_COUNTERS:
            yield self._family(CounterMetricFamily, f"entropic_{name}", text, key, parts)
        text = "Whether the warm-up is over."
        yield self._family(GaugeMetricFamily, "entropic_ready", text, "ready", parts)

    def _family(self, family: type, name: str, text: str, key: str, parts: Sequence[Any]) -> Any:
        metric = family(name, text, labels=["model_name", "engine"])
        for rank, part in enumerate(parts):
            metric.add_metric([self.model, str(rank)], float(part.get(key, 0)))
        return metric
