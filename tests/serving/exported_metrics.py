"""Names of the metrics that a server exports, for tests of what queries them."""

import re

import pytest

METRIC = re.compile(r"\b(?:vllm:|entropic_)\w+")


class IdleEngine:
    ranks = 1

    def snapshot(self):
        return {}

    def ready(self):
        return True


def exported_metrics() -> set[str]:
    """The names of all samples, with suffixes such as `_total` and `_bucket`."""
    metrics = pytest.importorskip("entropic_jax.serving.http.metrics")
    text = metrics.Metrics(IdleEngine(), "model").text().decode()
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}


def unmatched_brackets(query: str) -> set[str]:
    """The brackets of a PromQL expression that have no counterpart."""
    left = re.sub(r'"[^"]*"', "", query)
    while (shorter := re.sub(r"\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]", "", left)) != left:
        left = shorter
    return set(left) & set("(){}[]")
