"""Latency of streams with drafts: how a token's time is counted, and what two servers are offered."""

import argparse

import pytest

from benchmarks.harness.held_out_text import module_tokens
from benchmarks.harness.tables import markdown
from benchmarks.serving import workload
from benchmarks.serving.draft_latency import measure, report
from entropic_jax.serving.bench.client import Outcome
from entropic_jax.serving.options.model import EMBEDDED
from tests.serving.fake_server import FakeServer

OPTIONS = argparse.Namespace(
    model=EMBEDDED, rows=2, requests=8, repeat=2, load=0.7, temperature=0.7, quick=True, contexts=[16]
)


def test_tokens_of_an_event_arrive_together_or_are_spread():
    outcome = Outcome(0.0, 0.0, 1, 6, chunks=[(1.0, 2), (1.1, 1), (1.2, 0), (1.4, 3)])
    assert list(measure.arriving_gaps(outcome)) == pytest.approx([100, 300, 0, 0])
    assert list(measure.spread_gaps(outcome)) == pytest.approx([100, 100, 100, 100])
    assert list(measure.spread_gaps(Outcome(0.0, 0.0, 1, 0))) == []


@pytest.fixture
def results(monkeypatch):
    counts = iter(range(0, 10**6, 10))
    state = lambda url: {measure.DRAFTED: (n := next(counts)), measure.ACCEPTED: n // 2}
    monkeypatch.setattr(measure, "engine_state", state)
    sent, loops = {}, []

    def hurried(url, requests, prompts, concurrency=None, **body):
        """Arrivals come faster than they would, and the second server sends three tokens an event."""
        if concurrency is not None:
            loops.append(concurrency)
        else:
            sent.setdefault(url, []).append(([a.time for a in requests], prompts.seed, body["seed"]))
        soon = [arrival._replace(time=0.0) for arrival in requests]
        fake = {"gap": 0.002, "per_chunk": 3 if url == drafting.url else 1}
        return workload.drive(url, soon, prompts, concurrency, fake=fake, **body)

    monkeypatch.setattr(measure, "drive", hurried)
    monkeypatch.setattr(measure, "sustained", lambda outcomes, concurrency: 10.0)
    tokens = module_tokens(EMBEDDED / "tokenizer.json")
    with FakeServer() as plain, FakeServer() as drafting:
        servers = {measure.OFF: plain, measure.ON: drafting}
        cell = measure.cell(servers, tokens, 16, OPTIONS)
        assert sent[plain.url] == sent[drafting.url], "both are offered the same"
        times, *_ = sent[plain.url][0]
        assert times[-1] > 0 and len({seed for _, seed, _ in sent[plain.url]}) == OPTIONS.repeat
    described = {"cpu": "", "model": "m", "dtype": "float32", "rows": 2, "load": 0.7, "temperature": 0.7}
    return {**described, "date": "2026-01-01", "commit": "0123abc", "cells": [cell], "closed loops": loops}


def test_a_part_of_the_sustained_rate_is_offered_to_both(results):
    (cell,) = results["cells"]
    assert cell["rate"] == pytest.approx(7.0) and cell["equal"] == cell["control"] == [8, 8]
    assert results["closed loops"] == [4, 4, 4, 4], "two that warm up, and two that are a control"
    assert [run["preset"] for run in cell["runs"]] == ["off", "meso", "meso", "off"]
    (title, header, gaps), (_, columns, runs) = report.tables(results)
    assert "70%" in title and [row[:2] for row in gaps] == [["4–16", kind] for kind in report.KINDS]
    assert all(len(row) == len(header) for row in gaps) and all(len(row) == len(columns) for row in runs)
    off, meso = runs
    assert (off[5], meso[1]) == ("1.00 (1.00–1.00)", "meso") and float(meso[5].split()[0]) > 2
    assert off[-3:] == ["20", "0.50", "16 of 16"]
    assert "at most 1.1 times" in markdown(report.tables(results), report.notes(results), "")


def test_texts_that_differ_are_counted(results):
    (cell,) = results["cells"]
    cell["equal"], cell["control"] = [8, 7], [6, 8]
    assert [row[-1] for row in report.tables(results)[1][2]] == ["14 of 16", "15 of 16"]
    texts = [[Outcome(0.0, 0.0, 1, 1, text=text) for text in several] for several in ("abc", "abd")]
    assert measure.equal_texts(*texts) == 2
