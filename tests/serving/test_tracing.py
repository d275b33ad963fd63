"""OpenTelemetry traces; skipped without its SDK."""

import httpx2
import pytest

from entropic_jax.serving.http.frontend import Frontend
from entropic_jax.serving.http.settings import Settings
from entropic_jax.serving.http.tracing import exporter
from entropic_jax.serving.request import RequestError

from .live import serving
from .scripted_engine import ScriptedEngine


def test_a_span_for_each_request(served):
    trace = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `tracing` is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, memory = trace.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    frontend = Frontend(ScriptedEngine(served), served, Settings(port=0))
    with serving(frontend, provider) as live:
        for streamed in (False, True):
            body = {"prompt": [5, 6], "max_tokens": 3, "stream": streamed}
            headers = {"traceparent": parent}
            httpx2.post(f"{live.url}/v1/completions", json=body, headers=headers).raise_for_status()
    spans = [span for span in memory.get_finished_spans() if "gen_ai.usage.output_tokens" in span.attributes]
    assert len(spans) == 2
    for span in spans:
        assert format(span.context.trace_id, "032x") == "ab" * 16
        assert "/v1/completions" in span.name
        assert span.attributes["gen_ai.usage.input_tokens"] == 2
        assert span.attributes["gen_ai.usage.output_tokens"] == 3
        assert span.attributes["entropic.time"] == 1.5


def test_without_the_extra_the_flag_says_so(monkeypatch):
    assert exporter(None) is None
    monkeypatch.setitem(
        __import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )
    with pytest.raises(RequestError, match=r"--otlp-traces-endpoint needs .*\[tracing\]'; got http://x"):
        exporter("http://x")
