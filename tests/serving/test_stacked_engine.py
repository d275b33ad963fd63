"""An engine whose programs scan over layers gives the tokens of one whose programs are unrolled."""

import logging
from pathlib import Path
from typing import Any

import pytest

from entropic_jax.models.layer_stack import VARIABLE
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.follower import identity_of
from entropic_jax.serving.engine.start import start
from entropic_jax.serving.offline import generation
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.request import Request
from tests.serving.test_engine import copies_no_pool, crowd, engine_request, nothing_is_left, prompt, run

OPTIONS: dict[str, Any] = dict(max_num_seqs=4, block_size=4, max_steps=4, warmup="none", dtype="float32")


def started(directory: str, monkeypatch: pytest.MonkeyPatch, layers: str, **options: Any) -> LLMEngine:
    """An engine whose layers are scanned or unrolled."""
    monkeypatch.setenv(VARIABLE, layers)
    engine = start(directory, EngineOptions(**{**OPTIONS, **options}))
    assert isinstance(engine, LLMEngine)
    return engine


def requests() -> list:
    """Requests that are sampled, that share a prefix, that repeat themselves, and that read few pages."""
    shared = prompt(60, 7)
    greedy = dict(temperature=0.0, max_tokens=24)
    return [
        *crowd(),
        engine_request("shared", shared, **greedy),
        engine_request("longer", (*shared, *prompt(9, 8)), **greedy),
        engine_request("repeats", prompt(6, 3) * 8, Control("meso"), **greedy),
        engine_request("pruned", prompt(90, 4), Control("full-lossy"), seed=2),
    ]


@pytest.mark.exhaustive
def test_an_engine_scans_and_gives_the_same_tokens(directory, monkeypatch):
    results = {}
    for layers in ("unrolled", "scanned"):
        engine = started(directory, monkeypatch, layers, speculate="suffix", pruning=True)
        first = [tokens for tokens, _ in run(engine, *requests())]
        results[layers] = first, [tokens for tokens, _ in run(engine, *requests())]  # with cached prefixes
        pools = engine.scheduler.device_state.state.cache.layers
        assert hasattr(pools, "places") == (layers == "scanned") and len(pools) == 2
        if layers == "scanned":
            copies_no_pool(engine, "apply", "prefill", "decode")
        engine.close()
        nothing_is_left(engine)
    assert results["scanned"] == results["unrolled"]


def test_an_engine_with_adapters_is_unrolled_and_says_so(directory, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    engine = started(directory, monkeypatch, "scanned", enable_lora=True, max_loras=1, max_lora_rank=4)
    assert isinstance(engine.scheduler.device_state.state.cache.layers, tuple)
    engine.close()
    assert "layers are unrolled, not scanned, in programs of a model with adapters" in caplog.text


@pytest.mark.exhaustive
def test_without_a_server_a_draft_model_and_its_target_are_scanned(directory, monkeypatch):
    request, results = Request(prompt=prompt(30, 1), max_tokens=12, temperature=0.0, ignore_eos=True), []
    for layers in ("unrolled", "scanned"):
        monkeypatch.setenv(VARIABLE, layers)
        generator: Any = generation.load(Path(directory), "float32", speculate=directory)
        both = generator.model.target, generator.model.draft
        assert [model.stacked for model in both] == [layers == "scanned"] * 2
        results.append(next(iter(generator.batch([request]))).token_ids)
    assert results[0] == results[1] and len(results[0]) == 12


def test_processes_must_agree_on_the_form_of_layers(directory, monkeypatch):
    identities = []
    for layers in ("unrolled", "scanned"):
        monkeypatch.setenv(VARIABLE, layers)
        identities.append(identity_of(Path(directory), EngineOptions()))
    assert {name for name in identities[0] if identities[0][name] != identities[1][name]} == {VARIABLE}
