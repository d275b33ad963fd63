"""Methods in the engine: the same tokens as offline, alone and in a crowd; all pages come back."""

from functools import partial
from typing import Any

import pytest

from entropic_jax import models
from entropic_jax.methods import registry
from entropic_jax.methods.budgeted_prefill import BudgetedPrefill
from entropic_jax.methods.criti_prefill import CritiPrefill
from entropic_jax.methods.entropy_prefill import EntropyPrefill
from entropic_jax.methods.head_needs import MODEL_FIELDS, HeadNeeds, save_head_needs
from entropic_jax.methods.latent_compression import LatentCompression
from entropic_jax.methods.presets import preset
from entropic_jax.methods.registry import METHODS, Entry
from entropic_jax.methods.snapkv import SnapKV
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.metrics_hooks import MetricsHooks
from entropic_jax.serving.offline import engine as offline
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.request import Request, RequestError
from entropic_jax.state import cache
from tests.serving.test_engine import (
    EXACT,
    WARM,
    copies_no_pool,
    engine_request,
    nothing_is_left,
    prompt,
    run,
)

SMALL = dict(base=16, segment=16, dense_below=16, dense_layers=0, page_size=4)
MEASURED = dict(tokens=64, segment=16, page_size=4, budget=16, dense_layers=0)  # of a table of head needs
OPTIONS = {**EXACT, "batch_invariant": False, "pruning": False}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Methods for texts of 128 positions, and pages as small offline as in the engine."""
    monkeypatch.setattr(cache, "default_page_size", lambda: 4)
    prefill = partial(EntropyPrefill, **SMALL)
    for name, parts in {
        "entropy-prefill": (prefill,),
        "entropyinfer": (prefill, partial(LatentCompression, budget=24, window=8, delay=5)),
        "criti-prefill": (partial(CritiPrefill, **SMALL),),
        "budgeted-prefill": (partial(BudgetedPrefill, **SMALL),),
        "snapkv": (None, partial(SnapKV, budget=24, window=8)),
    }.items():
        monkeypatch.setitem(METHODS, name, Entry("for a test", *parts))


@pytest.fixture(scope="module")
def model(directory) -> models.Model:
    """A model with random weights."""
    return models.load(directory, "float32")


def engine_of(model, name: str, **options):
    engine = LLMEngine(model, EngineOptions(**{**OPTIONS, "method": name, **options}))
    yield engine
    engine.close()
    nothing_is_left(engine)


def crowd(seed: int = 1):
    lengths = (5, 80, 1, 37, 90, 61)
    return [
        engine_request(f"c{i}", prompt(n, seed + i), seed=i, max_tokens=16, **WARM)
        for i, n in enumerate(lengths)
    ]


OTHERS = ("entropy-prefill", "criti-prefill", "snapkv", "adakv", "quest")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["budgeted-prefill", "entropyinfer", *OTHERS])
def test_as_offline_alone_and_in_a_crowd(model, tmp_path, name):
    single = engine_request("mine", prompt(85, 99), seed=5, max_tokens=30, **WARM)
    budgets = (("budget", 64),) if name in ("adakv", "quest") else ()
    extra: tuple[tuple[str, Any], ...] = ()
    if name == "budgeted-prefill":
        shape = model.decoder.shape
        sizes = {field: getattr(shape, field) for field in MODEL_FIELDS}
        table = tuple(tuple(1.0 + 7 * head for head in range(shape.kv_heads)) for _ in range(shape.layers))
        save_head_needs(HeadNeeds(**sizes, **MEASURED, need=table), tmp_path)
        extra = (("table", str(tmp_path)), ("entropy", True))
    options = dict(budgets=budgets, prefill_options=extra, block_size=16 if name == "quest" else 4)
    for engine in engine_of(model, name, **options):
        ((alone, last),) = run(engine, single)
        assert last.finish_reason == "length"
        left = engine.submit(engine_request("leaves", prompt(90, 3), max_tokens=30, **WARM))
        next(iter(left))
        left.cancel()
        results = run(engine, *crowd(), single, *crowd(20))
        assert results[6][0] == alone
    method = registry.add_method(name, preset("off"), **dict(budgets), prefill_options=dict(extra))
    reference = offline.Engine(model, method)
    request = Request(prompt=single.request.prompt, seed=5, max_tokens=30, ignore_eos=True, **WARM)
    assert list(next(reference.batch([request])).token_ids) == alone


class Events(MetricsHooks):
    """Records the events of sequences."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def admitted(self, sequence) -> None:
        self.seen.append(("admitted", sequence.engine_request.id))

    def finished(self, sequence, delta) -> None:
        self.seen.append(("finished", sequence.engine_request.id))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "together"), [("entropyinfer", True), ("dense", False)])
def test_pages_emptied_serve_others(model, name, together):
    """Two long prompts do not fit next to each other, unless the first is compressed."""
    for engine in engine_of(model, name, num_pages=40, enable_prefix_caching=False):
        engine.scheduler.batch.metrics_hooks = events = Events()
        results = run(
            engine, *(engine_request(f"j{i}", prompt(100, i), max_tokens=25, **WARM) for i in range(2))
        )
        assert [last.finish_reason for _, last in results] == ["length"] * 2
        first, then = ("admitted", "finished") if together else ("finished", "admitted")
        assert [what for what, _ in events.seen] == ["admitted", first, then, "finished"]
        assert engine.snapshot()["preemptions"] == 0


@pytest.mark.slow
def test_what_a_method_made_is_not_shared(model):
    for engine in engine_of(model, "entropyinfer"):
        long, short = prompt(90, 7), prompt(16, 8)
        for ids, cached in ((long, 0), (short, 12)):
            run(engine, engine_request("first", ids))
            assert run(engine, engine_request("again", ids))[0][1].cached_tokens == cached
        cache.check(
            engine.scheduler.device_state.state.cache, engine.scheduler.block_manager.prefix_cache.pages()
        )


@pytest.mark.exhaustive
def test_preemption_tells_a_compressed_row_its_tokens_again(model):
    engine_requests = [
        engine_request(f"j{i}", prompt(30, i), seed=i, max_tokens=60, **WARM) for i in range(6)
    ]
    kept = []
    for pages in (400, 34):
        for engine in engine_of(model, "snapkv", num_pages=pages):
            kept.append([tokens for tokens, _ in run(engine, *engine_requests)])
            assert (engine.snapshot()["preemptions"] > 0) == (pages == 34)
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_no_program_copies_the_pool(model):
    for engine in engine_of(model, "entropyinfer"):
        run(engine, *crowd())
        copies_no_pool(engine, "prefill", "decode", "compress")


@pytest.mark.slow
def test_what_a_server_refuses(model):
    for engine in engine_of(model, "snapkv"):
        with pytest.raises(RequestError, match="method must be snapkv; got 'h2o'"):
            engine.submit(engine_request("x", (1,), Control(method="h2o")))
    with pytest.raises(ValueError, match="budgets must map cache_budget to an integer of at least 64; got 3"):
        LLMEngine(model, EngineOptions(**OPTIONS, method="h2o", budgets=(("budget", 3),)))
