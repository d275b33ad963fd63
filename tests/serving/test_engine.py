"""Invariants of the engine: results do not depend on other requests, and all rows and pages come back."""

import asyncio
import dataclasses
import math
import time
from collections.abc import Iterator

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models.layer_stack import scans_layers, stack_layers
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.interface import Delta, EngineRequest, Grammar, QueueFullError
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.request import Request, RequestError
from entropic_jax.state import cache

EXACT = dict(max_num_seqs=4, max_num_batched_tokens=128, block_size=4, max_steps=4, batch_invariant=True)
EXACT |= dict(warmup="none", scheduling_policy="entropic")
WARM = dict(temperature=0.9, top_p=0.95)
VOCABULARY = 258


@pytest.fixture(scope="module")
def model(directory) -> models.Model:
    """A model with random weights, sharp enough for entropies to vary; see `tests.tiny` for stacks."""
    loaded = models.load(directory, "float32")
    params = {**loaded.params, "lm_head": {"kernel": 3 * loaded.params["lm_head"]["kernel"]}}
    loaded = dataclasses.replace(loaded, params=params)
    return stack_layers(loaded) if scans_layers() else loaded


def engine_of(model, **options) -> Iterator[LLMEngine]:
    engine = LLMEngine(model, EngineOptions(**{**EXACT, **options}))
    yield engine
    engine.close()
    nothing_is_left(engine)


def nothing_is_left(engine) -> None:
    """Check that every page is free or in the prefix cache, on the device and in the block manager."""
    scheduler = engine.scheduler
    scheduler.collect_all()
    scheduler.apply_updates()
    kept = (
        [] if scheduler.block_manager.prefix_cache is None else scheduler.block_manager.prefix_cache.pages()
    )
    if engine._failure is None:
        cache.check(scheduler.device_state.state.cache, kept)
        assert scheduler.block_manager.num_free_pages == engine.sizes.pages - len(kept)
        assert int(scheduler.device_state.state.cache.available) == scheduler.block_manager.num_free_pages
    assert not engine._live and engine._queued == 0


@pytest.fixture(scope="module")
def exact(model):
    yield from engine_of(model)


@pytest.fixture(scope="module")
def plain(model):
    yield from engine_of(model, batch_invariant=False, enable_prefix_caching=False)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(2, 200, length).tolist())


def engine_request(name: str, ids, control: Control | None = None, **fields) -> EngineRequest:
    outside = {k: fields.pop(k) for k in list(fields) if k in EngineRequest.__dataclass_fields__}
    fields = {"max_tokens": 12, "ignore_eos": True, **fields}
    return EngineRequest(
        id=name, request=Request(prompt=ids, **fields), control=control or Control(), **outside
    )


def collect(output_stream) -> tuple[list[int], Delta]:
    deltas = list(output_stream)
    return [token.id for delta in deltas for token in delta.tokens], deltas[-1]


def run(engine, *engine_requests: EngineRequest) -> list[tuple[list[int], Delta]]:
    return [collect(output_stream) for output_stream in [engine.submit(j) for j in engine_requests]]


def crowd(seed: int = 1) -> list[EngineRequest]:
    lengths = (5, 31, 1, 17, 40, 8, 22)
    return [engine_request(f"crowd {i}", prompt(n, seed + i), seed=i, **WARM) for i, n in enumerate(lengths)]


def copies_no_pool(engine: LLMEngine, *kinds: str) -> None:
    """Check that programs of these kinds have been compiled, and that none of them copies the pool."""
    shape = f"f32[{','.join(map(str, engine.scheduler.device_state.state.cache.layers[0].keys.shape))}]"
    seen = set()
    for key, program in engine.programs._compiled.items():
        if key[0] in kinds:
            text = program.as_text()
            assert shape in text, "the test looks for the wrong thing"
            copies = [line for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
            assert not copies, (key, copies)
            seen.add(key[0])
    assert seen == {*kinds}


@pytest.mark.slow
def test_a_job_gets_the_same_alone_and_in_a_crowd(exact):
    single = engine_request("mine", prompt(37, 99), seed=5, **WARM)
    ((alone, last),) = run(exact, single)
    assert last.finish_reason == "length" and last.usage == (37, 12)
    results = run(exact, *crowd(), single, *crowd(20))
    assert results[7][0] == alone
    again = run(exact, *reversed([*crowd(), single, *crowd(20)]))
    assert [tokens for tokens, _ in reversed(again)] == [tokens for tokens, _ in results]


@pytest.mark.slow
def test_a_prefix_is_found_and_changes_nothing(exact, plain):
    ids = prompt(100, 1007)
    first = engine_request("first", ids, seed=3, **WARM)
    (cold, computed), (warm, again) = run(exact, first)[0], run(exact, first)[0]
    assert cold == warm
    assert computed.cached_tokens == 0 and again.cached_tokens == 64  # one piece
    longer = engine_request("longer", ids[:70] + prompt(9, 8), seed=3, **WARM)
    ((after, cached),) = run(exact, longer)
    assert cached.cached_tokens == 64
    assert after == run(plain, longer)[0][0]
    scored = dataclasses.replace(first, prompt_logprobs=1)
    assert run(exact, scored)[0][1].cached_tokens == 0  # what is scored is read


def test_generated_pages_are_found_by_a_prompt_that_continues_the_text(model):
    for engine in engine_of(model, batch_invariant=False):
        ids = prompt(20, 3)
        ((tokens, _),) = run(engine, engine_request("first", ids, temperature=0.0, max_tokens=20))
        follow = (*ids, *tokens, *prompt(3, 4))
        ((_, last),) = run(engine, engine_request("second", follow, temperature=0.0))
        assert last.cached_tokens == 36  # 39 positions were in the cache


@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_preemption_changes_nothing_and_loses_no_page(model, exact, plain, batch_invariant):
    penalties = {2: {"frequency_penalty": 0.5}, 3: {"dry_multiplier": 2.0, "dry_allowed_length": 1}}
    fields = [{**WARM, "max_tokens": 40, **penalties.get(i, {})} for i in range(6)]
    engine_requests = [engine_request(f"j{i}", prompt(30, i), seed=i, **fields[i]) for i in range(6)]
    reference = run(exact if batch_invariant else plain, *engine_requests)
    for engine in engine_of(model, num_pages=40, batch_invariant=batch_invariant):
        results = run(engine, *engine_requests)
        assert [tokens for tokens, _ in results] == [tokens for tokens, _ in reference]
        snapshot = engine.snapshot()
        assert snapshot["preemptions"] > 0
        assert 0 < snapshot["longest_wait"] <= snapshot["longest_wait_allowed"]
        for (_, last), (_, expected) in zip(results, reference, strict=True):
            assert last.summary["entropic_time"] == pytest.approx(expected.summary["entropic_time"], rel=1e-3)


def test_control_is_a_matter_of_each_sequence(exact):
    gains = (
        ("target_entropy", 2.0),
        ("dropped_mass_limit", 0.3),
        ("lowest_dropped_mass_limit", 0.3),
        ("low_entropy", 0.1),
        ("high_entropy", 9.0),
    )
    full = Control("full-lossy", gains)
    off = [engine_request(f"off {i}", prompt(40, i), seed=i, **WARM) for i in range(2)]
    on = [
        engine_request(f"on {i}", prompt(100, 10 + i), full, seed=i, max_tokens=25, **WARM) for i in range(2)
    ]
    alone = [run(exact, j)[0] for j in (*off, *on)]
    together = run(exact, *off, *on)
    assert [x[0] for x in together] == [x[0] for x in alone]
    plain = dataclasses.replace(on[0], control=Control())
    assert run(exact, plain)[0][0] != together[2][0]
    metrics = [t.metrics for d in exact.submit(on[0]) for t in d.tokens]
    assert len({m["temperature"] for m in metrics}) > 1
    assert any(m["kept_fraction"] < 1 for m in metrics)
    assert all(m["kept_fraction"] == 1 for d in exact.submit(off[0]) for t in d.tokens for m in [t.metrics])


@pytest.mark.slow
def test_a_pruned_job_survives_preemption(model, exact):
    gains = (
        ("dropped_mass_limit", 0.3),
        ("lowest_dropped_mass_limit", 0.3),
        ("low_entropy", 0.1),
        ("high_entropy", 9.0),
    )
    engine_requests = [
        engine_request(f"j{i}", prompt(90, i), Control("full-lossy", gains), seed=i, max_tokens=30, **WARM)
        for i in range(4)
    ]
    reference = run(exact, *engine_requests)
    for engine in engine_of(model, num_pages=80):
        assert [t for t, _ in run(engine, *engine_requests)] == [t for t, _ in reference]
        assert engine.snapshot()["preemptions"] > 0


def test_ends(exact):
    free, _ = run(exact, engine_request("free", prompt(9), temperature=0.0, max_tokens=20))[0]
    i = next(i for i in range(2, 20) if free[i] not in free[:i])
    stopped, last = run(
        exact, engine_request("token", prompt(9), temperature=0.0, max_tokens=20, stop_token_ids=(free[i],))
    )[0]
    assert stopped == free[: i + 1]
    assert (last.finish_reason, last.stop_reason) == ("stop", free[i])
    late, _ = run(
        exact,
        engine_request(
            "late", prompt(9), temperature=0.0, stop_token_ids=(free[0],), min_tokens=3, max_tokens=20
        ),
    )[0]
    assert free[0] not in late[:3] and len(late) > 3
    text = "".join(
        t.text
        for d in exact.submit(engine_request("t", prompt(9), temperature=0.0, max_tokens=20))
        for t in d.tokens
    )
    part = text[3:5]
    deltas = list(
        exact.submit(engine_request("string", prompt(9), temperature=0.0, max_tokens=20, stop=(part,)))
    )
    assert "".join(t.text for d in deltas for t in d.tokens) == text[: text.index(part)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", part)
    full, last = run(exact, engine_request("context", prompt(120), temperature=0.0, max_tokens=99))[0]
    assert (len(full), last.finish_reason) == (exact.context - 119, "length")


def test_bias_and_logprobs(exact):
    ids = prompt(20)
    deltas = list(
        exact.submit(engine_request("bias", ids, logit_bias={77: 100.0}, temperature=0.0, logprobs=3))
    )
    tokens = [t for d in deltas for t in d.tokens]
    assert {t.id for t in tokens} == {77}
    for token in tokens:
        assert len(token.top) == 3 and token.logprob <= token.top[0].logprob < 0
        assert token.top[0].logprob >= token.top[1].logprob >= token.top[2].logprob
    greedy = list(exact.submit(engine_request("greedy", ids, temperature=0.0, logprobs=1, prompt_logprobs=1)))
    scored = [p for d in greedy for p in d.prompt]
    assert [p.id for p in scored] == list(ids) and scored[0].logprob is None
    assert all(p.logprob <= p.top[0].logprob for p in scored[1:])
    tokens = [t for d in greedy for t in d.tokens]
    assert all(t.logprob == t.top[0].logprob and t.id == t.top[0].id for t in tokens)
    # The prompt's next token, scored as part of a longer prompt, is as likely as when it was generated.
    longer = (*ids, tokens[0].id, 5)
    again = [p for d in exact.submit(engine_request("longer", longer, prompt_logprobs=1)) for p in d.prompt]
    assert again[20].logprob == pytest.approx(tokens[0].logprob, abs=1e-4)
    total = [
        t for d in exact.submit(engine_request("sum", ids, temperature=0.0, logprobs=20)) for t in d.tokens
    ]
    assert 0.1 < sum(math.exp(a.logprob) for a in total[0].top) <= 1 + 1e-5


class Alternating(Grammar):
    """Allows even tokens, then odd ones, in turn; ends after six."""

    failure = None

    def __init__(self) -> None:
        self.count = 0

    def mask(self) -> np.ndarray:
        bits = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
        bits[self.count % 2 : VOCABULARY : 2] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> bool:
        assert token % 2 == self.count % 2
        self.count += 1
        return self.count < 6


def test_grammars_hold_beside_free_requests(exact):
    free = engine_request("free", prompt(30), seed=4, **WARM)
    ((alone, _),) = run(exact, free)
    (beside, _), (held, last) = run(
        exact, free, engine_request("held", prompt(12), seed=1, grammar=Alternating(), **WARM)
    )
    assert beside == alone
    assert [t % 2 for t in held] == [0, 1, 0, 1, 0, 1] and last.finish_reason == "stop"


def test_nan_ends_one_row(model, exact):
    good = engine_request("good", prompt(20), seed=1, logit_bias={250: -math.inf}, **WARM)
    ((alone, _),) = run(exact, good)
    embedding = model.params["embed_tokens"]["weight"].at[250].set(math.nan)
    broken = dataclasses.replace(model, params={**model.params, "embed_tokens": {"weight": embedding}})
    for engine in engine_of(broken):
        (tokens, _), (none, last) = run(engine, good, engine_request("bad", (5, 250, 7, 9)))
        assert tokens == alone
        assert (none, last.finish_reason) == ([], "error") and "not numbers" in last.error


def test_cancelling_at_any_point(exact):
    long = [engine_request(f"long {i}", prompt(100, i), max_tokens=20, seed=i, **WARM) for i in range(9)]
    output_streams = [exact.submit(j) for j in long]
    for delay, output_stream in zip((0, 0, 0.001, 0.003, 0.01, 0.03), output_streams, strict=False):
        time.sleep(delay)
        output_stream.cancel()
    results = [collect(t) for t in output_streams]
    assert all(last.finish_reason in ("abort", "length") for _, last in results)
    assert results[0][1].finish_reason == "abort"
    assert [last.finish_reason for _, last in results[6:]] == ["length"] * 3
    output_streams[0].cancel()  # once more is no harm


def test_timeouts(exact):
    ((tokens, last),) = run(exact, engine_request("slow", prompt(90), max_tokens=38, timeout=1e-4))
    assert last.finish_reason == "error" and last.timed_out and "timeout of 0.0001 s" in last.error


def test_readers_in_an_event_loop(exact):
    async def read(output_stream):
        return [token.id async for delta in output_stream for token in delta.tokens]

    async def main():
        engine_requests = crowd(50)
        return await asyncio.gather(*(read(exact.submit(j)) for j in engine_requests))

    assert asyncio.run(main()) == [tokens for tokens, _ in run(exact, *crowd(50))]


@pytest.mark.slow
def test_the_queue_is_bounded_and_drains(model):
    engine = LLMEngine(model, EngineOptions(**{**EXACT, "max_queue": 3, "max_num_seqs": 1}))
    output_streams = []
    flood = (output_streams.append(engine.submit(engine_request(str(i), prompt(5, i)))) for i in range(9))
    with pytest.raises(QueueFullError) as full:
        list(flood)
    assert full.value.retry_after >= 1
    engine.close(drain=60)
    assert [collect(t)[1].finish_reason for t in output_streams] == ["length"] * len(output_streams)
    nothing_is_left(engine)
    with pytest.raises(QueueFullError):
        engine.submit(engine_request("late", prompt(5)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(ids=()), "prompt must have between 1 and 127 tokens, .*; got 0"),
        (dict(ids=(1,) * 200), "prompt must have .*; got 200"),
        (dict(ids=(1, 258)), "prompt must hold token ids between 0 and 257; got 258"),
        (dict(ids=(1,), stop_token_ids=(999,)), "stop_token_ids must hold token ids .* 257; got 999"),
        (
            dict(ids=(1,), logit_bias=dict.fromkeys(range(301), 1.0)),
            "logit_bias must be a mapping of up to 300 ",
        ),
        (dict(ids=(1,), logprobs=21), "logprobs must be at most 20; got 21"),
        (
            dict(ids=(1,), control=Control("paper")),
            "preset must be one of off, micro, macro, full, meso-lossy, full-lossy; got 'paper'",
        ),
        (
            dict(ids=(1,), control=Control("micro", (("law", "exact"),))),
            "law must be normalised, the law of this engine; got 'exact'",
        ),
    ],
)
def test_requests_that_cannot_be_served(exact, fields, message):
    with pytest.raises(RequestError, match=message):
        exact.submit(engine_request("wrong", **fields))


def test_a_failure_ends_every_job(model, monkeypatch):
    engine = LLMEngine(model, EngineOptions(**EXACT))
    assert engine.warmup.ended.wait(60)
    monkeypatch.setattr(engine.scheduler, "step", lambda: 1 / 0)
    output_stream = engine.submit(engine_request("one", prompt(5)))
    _, last = collect(output_stream)
    assert last.finish_reason == "error" and "division by zero" in last.error
    assert not engine.ready()
    with pytest.raises(RuntimeError, match="the engine has failed"):
        engine.submit(engine_request("two", prompt(5)))
    engine.close()


def test_a_sequence_alone_that_finds_no_page_is_an_error_and_no_endless_loop(model, monkeypatch):
    engine = LLMEngine(model, EngineOptions(**EXACT))
    monkeypatch.setattr(engine.scheduler.block_manager, "reserve", lambda *arguments: False)
    _, last = collect(engine.submit(engine_request("one", prompt(5))))
    assert last.finish_reason == "error" and "a sequence alone in the pool finds no page" in last.error
    assert isinstance(engine.failure(), RuntimeError)
    engine.close()


def test_snapshot_says_what_is_in_flight(exact):
    output_stream = exact.submit(engine_request("shown", prompt(20), max_tokens=100, **WARM))
    next(iter(output_stream))
    shown = exact.snapshot()
    (sequence,) = shown["sequences"]
    assert sequence["id"] == "shown" and sequence["state"] in ("decode", "ended") and sequence["entropy"] > 0
    assert 0 < shown["kv_usage"] <= 1 and shown["running"] == 1
    assert shown["work_done"] > 0 and 0 <= shown["work_left"] <= 100
    output_stream.cancel()
    collect(output_stream)
