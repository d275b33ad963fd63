"""Branches in the engine: the same tokens as offline, alone and in a crowd; all rows and pages come back."""

import dataclasses

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.calibration import load_calibration
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.metrics_hooks import MetricsHooks
from entropic_jax.serving.engine.sequence import Sequence
from entropic_jax.serving.offline.search_engine import make_engine as offline_engine
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.options.model import EMBEDDED
from entropic_jax.serving.request import RequestError
from entropic_jax.state import cache
from tests.serving.test_engine import (
    EXACT,
    WARM,
    Alternating,
    collect,
    copies_no_pool,
    engine_request,
    nothing_is_left,
    prompt,
    run,
)

pytestmark = pytest.mark.slow

THREE = Control("entropix", (("branches", 3),))
TWO = Control("entropix", (("branches", 2),))
OPTIONS = {**EXACT, "preset": "entropix", "branches": 3}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Pages as small offline as in the engine: agreement of heads is measured over pages."""
    monkeypatch.setattr(cache, "default_page_size", lambda: OPTIONS["block_size"])


@pytest.fixture(scope="module")
def model(directory) -> models.Model:
    """A model with random weights, sharp enough for entropies to vary."""
    loaded = models.load(directory, "float32")
    params = {**loaded.params, "lm_head": {"kernel": 3 * loaded.params["lm_head"]["kernel"]}}
    return dataclasses.replace(loaded, params=params)


@pytest.fixture(scope="module")
def calibration():
    """A calibration with which the untrained model branches, looks ahead and rolls back."""
    entropy = (0.5, 0.6, 0.7, 1.5, 2.4, 4.0, 4.5)
    varentropy = (0.5, 1.0, 1.5, 2.0, 2.5, 2.8, 4.0)
    return load_calibration(EMBEDDED)._replace(quantiles=entropy, varentropy_quantiles=varentropy)


def engine_of(model, calibration, **options):
    engine = LLMEngine(model, EngineOptions(**{**OPTIONS, **options}), calibration)
    yield engine
    engine.close()
    nothing_is_left(engine)
    state, branch_state = engine.scheduler.device_state.state, engine.scheduler.device_state.branch_state
    assert not np.asarray(state.cache.granted).any() and not np.asarray(branch_state.search.steps_left).any()


@pytest.fixture(scope="module")
def exact(model, calibration):
    yield from engine_of(model, calibration)


def searching(seed: int = 1, **fields):
    lengths = (5, 31, 1, 17, 40)
    fields = {"max_tokens": 30, **WARM, **fields}
    return [
        engine_request(f"s{seed}-{i}", prompt(n, seed + i), THREE, seed=i, **fields)
        for i, n in enumerate(lengths)
    ]


def offline(model, calibration, control, *engine_requests):
    reference = offline_engine(control, calibration, model)
    return [list(done.token_ids) for done in reference.batch([j.request for j in engine_requests])]


def plain(engine_requests):
    return [dataclasses.replace(request, control=Control()) for request in engine_requests]


def tokens_of(results):
    return [tokens for tokens, _ in results]


ENDS = dict(
    eos=engine_request(
        "eos", prompt(12, 5), THREE, seed=5, max_tokens=40, ignore_eos=False, logit_bias={1: 4.0}, **WARM
    ),
    token=engine_request(
        "token", prompt(9, 6), THREE, seed=6, max_tokens=40, stop_token_ids=(*range(40, 56),), **WARM
    ),
    context=engine_request("context", prompt(110, 5), THREE, max_tokens=99, **WARM),
)


@pytest.fixture(scope="module")
def reference(model, calibration):
    """Offline tokens of `searching()` and `ENDS`, in one batch, so that one program serves all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "default_page_size", lambda: OPTIONS["block_size"])
        return offline(model, calibration, THREE, *searching(), *ENDS.values())


def test_as_offline_alone_and_in_a_crowd(reference, exact):
    engine_requests, expected = searching(), reference[:5]
    assert [run(exact, request)[0][0] for request in engine_requests] == expected
    tally = exact.snapshot()
    assert all(tally[name] > 0 for name in ("explored", "looked", "returned", "discarded")), tally
    alone = [run(exact, request)[0][0] for request in plain(engine_requests)]
    mixed = run(exact, *searching(50), *engine_requests, *plain(engine_requests), *searching(70))
    assert tokens_of(mixed[5:15]) == expected + alone


def test_ends_of_every_kind(reference, exact):
    """A stop token, in branches too; the end of the context; a stop string; a greedy row."""
    for (name, single), expected in zip(ENDS.items(), reference[5:], strict=True):
        tokens, last = run(exact, single)[0]
        assert tokens == expected
        assert last.finish_reason == ("length" if name == "context" else "stop"), name
    assert exact.context == 110 + len(tokens) - 1
    text = "".join(t.text for d in exact.submit(searching()[1]) for t in d.tokens)
    deltas = list(exact.submit(searching(stop=(text[9:12],))[1]))
    assert "".join(t.text for d in deltas for t in d.tokens) == text[: text.index(text[9:12])]
    greedy = engine_request("greedy", prompt(9), THREE, temperature=0.0)
    assert run(exact, greedy)[0][0] == run(exact, *plain([greedy]))[0][0]


def test_logprobs_emitted_are_those_of_the_model(exact):
    """Also for tokens that were drawn as the first of a branch, with their alternatives."""
    branching = searching(logprobs=5)[4]
    emitted = [t for d in exact.submit(branching) for t in d.tokens]
    text = (*branching.request.prompt, *(t.id for t in emitted), 5)
    scored = engine_request("scored", text, prompt_logprobs=5, max_tokens=1)
    again = [p for d in exact.submit(scored) for p in d.prompt][len(branching.request.prompt) :]
    for token, expected in zip(emitted, again, strict=False):
        assert token.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [a.id for a in token.top] == [a.id for a in expected.top]


def test_a_prompt_that_is_known_changes_nothing(exact):
    branching = engine_request("mine", prompt(100, 1007), THREE, seed=3, max_tokens=20, **WARM)
    (cold, computed), (warm, again) = run(exact, branching)[0], run(exact, branching)[0]
    assert (computed.cached_tokens, again.cached_tokens) == (0, 64) and cold == warm


def test_the_ledger_has_what_branches_cost(exact):
    for request in searching()[:3]:
        deltas = list(exact.submit(request))
        kept = sum(t.metrics["cost"] for d in deltas for t in d.tokens)
        assert deltas[-1].summary["cost"] > 1.2 * kept


def test_work_given_ahead(reference, exact, monkeypatch):
    """As on an accelerator: a launch is collected after the next one has been submitted."""
    monkeypatch.setattr(exact.scheduler, "overlapped", True)
    mixed = run(exact, *searching(50), *searching(), *plain(searching(9)))
    assert tokens_of(mixed[5:10]) == reference[:5]


def test_cancelling_within_a_branch(exact, monkeypatch):
    """Rows and pages of a branch group come back at once, and the next sequence in it is not affected."""
    scheduler, left = exact.scheduler, []
    vacate = scheduler.batch.vacate
    looked = lambda s: (
        left.append(int(np.asarray(scheduler.device_state.branch_state.search.steps_left)[s.row]))
        or vacate(s)
    )
    monkeypatch.setattr(scheduler.batch, "vacate", looked)
    expected = tokens_of(run(exact, *searching()))
    for attempt in range(12):
        output_streams = [exact.submit(request) for request in searching(30 + attempt)[:4]]
        next(iter(output_streams[attempt % 4]))
        for output_stream in output_streams:
            output_stream.cancel()
        after = [exact.submit(request) for request in searching()]
        assert {collect(t)[1].finish_reason for t in output_streams} <= {"abort", "length"}
        if attempt % 4 == 3:
            assert tokens_of(map(collect, after)) == expected
        else:
            for output_stream in after:
                output_stream.cancel()
                collect(output_stream)
    assert any(n > 0 for n in left), "nobody was cancelled within a branch"
    assert exact.snapshot()["kv_usage"] == 0


def test_grammars_hold_beside_branches(exact):
    """A sequence with a grammar does not branch."""
    expected = tokens_of(run(exact, *searching()[:2]))
    held = engine_request("held", prompt(12), THREE, seed=1, grammar=Alternating(), **WARM)
    *others, (tokens, last) = run(exact, *searching()[:2], held)
    assert tokens_of(others) == expected
    assert [t % 2 for t in tokens] == [0, 1, 0, 1, 0, 1] and last.finish_reason == "stop"


@pytest.fixture(scope="module")
def scarce(model, calibration):
    """An engine whose pool has no room for two sequences with branches."""
    yield from engine_of(model, calibration, num_pages=36)


@pytest.mark.exhaustive
def test_scarce_pages(exact, scarce, monkeypatch):
    """A sequence that branches waits for all its pages and keeps them; others are preempted as usual."""
    engine_requests = [*searching(), *plain(searching(9, max_tokens=60)), *searching(40, max_tokens=12)]
    gave_way: list[Sequence] = []
    monkeypatch.setattr(scarce.scheduler.batch, "metrics_hooks", Preempted(gave_way))
    assert tokens_of(run(scarce, *engine_requests)) == tokens_of(run(exact, *engine_requests))
    assert gave_way and all(s.engine_request.control == Control() for s in gave_way)
    assert scarce.context == 4 * (36 - 2 * 3)
    long = engine_request("long", prompt(99, 3), THREE, seed=1, max_tokens=99, **WARM)
    assert len(run(scarce, long)[0][0]) == scarce.context - 98


@pytest.mark.exhaustive
@pytest.mark.parametrize("overlapped", [False, True])
def test_under_load_with_everything_at_once(exact, scarce, monkeypatch, overlapped):
    """Branches, rollbacks, preemption, cancellations and all kinds of ends: no answer changes."""
    kinds = [
        *searching(),
        *plain(searching(9, max_tokens=60)),
        *(dataclasses.replace(request, control=TWO) for request in searching(20)),
        *searching(30, stop=("a", "e"), max_tokens=50),
        *searching(60, stop_token_ids=(*range(40, 56),), logprobs=2),
    ]
    expected = [run(exact, request)[0][0] for request in kinds]
    monkeypatch.setattr(scarce.scheduler, "overlapped", overlapped)
    before, draw = scarce.snapshot(), np.random.default_rng(overlapped)
    output_streams = []
    for number in draw.integers(0, len(kinds), 100).tolist():
        grammar = Alternating() if draw.random() < 0.05 else None
        chosen = dataclasses.replace(kinds[number], grammar=grammar)
        leaves = draw.random() < 0.2
        output_stream = scarce.submit(chosen)
        if leaves and draw.random() < 0.5:
            next(iter(output_stream))
        if leaves:
            output_stream.cancel()
        output_streams.append((None if leaves or grammar else expected[number], output_stream))
    for tokens_expected, output_stream in output_streams:
        tokens, last = collect(output_stream)
        assert tokens_expected is None or tokens == tokens_expected
        assert last.finish_reason in ("stop", "length", "abort")
    after = scarce.snapshot()
    assert after["pages_free"] + after["prefix_pages"] == after["pages"]
    for name in ("explored", "looked", "returned", "discarded", "preemptions"):
        assert after[name] > before[name], name


@pytest.mark.exhaustive
def test_a_job_may_have_fewer_branches(model, calibration, exact):
    engine_requests = [dataclasses.replace(request, control=TWO) for request in searching()[:2]]
    assert tokens_of(run(exact, *engine_requests, *searching(50))[:2]) == offline(
        model, calibration, TWO, *engine_requests
    )


class Preempted(MetricsHooks):
    """Records the preempted sequences."""

    def __init__(self, seen: list) -> None:
        self.seen = seen

    def preempted(self, sequence) -> None:
        self.seen.append(sequence)


def test_no_program_copies_the_pool(exact):
    run(exact, *searching()[:1])
    copies_no_pool(exact, "apply", "prefill", "decode")


@pytest.mark.exhaustive
def test_with_programs_of_all_widths_and_nothing_is_compiled_late(model, calibration, reference):
    """Includes steps of leading rows only, which a batch-invariant engine does not have."""
    small = dict(max_num_seqs=2, max_num_batched_tokens=16)  # few programs
    options = dict(batch_invariant=False, pruning=False, warmup="min", **small)
    for engine in engine_of(model, calibration, **options):
        assert engine.warmup.ended.wait(600)
        assert [run(engine, request)[0][0] for request in searching()[:3]] == reference[:3]
        mixed = run(engine, *searching(50), *searching(), *searching(70))
        assert tokens_of(mixed[5:10]) == reference[:5]
        assert engine.compilations == 0


def test_what_cannot_be(model, calibration, exact):
    with pytest.raises(RequestError, match="branches must be between 1 and 3; got 4"):
        exact.submit(engine_request("x", (1,), Control("entropix", (("branches", 4),))))
    for options, said in (
        (dict(preset="off"), "branches must be 1 with the preset off; got 3"),
        (dict(method="snapkv"), "method must be dense where sequences branch; got 'snapkv'"),
        (dict(num_pages=6), "num_pages must be at least 7 with .*; got 6"),
        (dict(branches=0), "branches must be an integer between 1 and 64; got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            LLMEngine(model, EngineOptions(**{**OPTIONS, **options}), calibration)
