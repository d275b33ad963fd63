"""Branches and rollbacks: the best branch is kept, results match a reference, and no page leaks."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_jax import allocate, chain, loop, parameters, start
from entropic_jax.methods import entropix_search
from entropic_jax.methods.entropix import ADAPT, EXPLORE, RESAMPLE, Thresholds
from entropic_jax.methods.entropix_branches import SEED, SearchPlan, find_entropix_state
from entropic_jax.state import RUNNING, cache
from tests import tiny
from tests.marks import exhaustive
from tests.methods.test_entropix import forcing, law

TOKENS = 24
PLAN = SearchPlan(branches=3, length=4, rest=2, worth=0.5)  # one, with two sequences: few programs to compile
ALONE = SearchPlan(branches=1, window=16)


def begin(
    texts, plan: SearchPlan, controller, *, pages: int | None = None, page_size: int = 4, **options: Any
):
    m, rows = tiny.model(), len(texts) * plan.branches
    pool = allocate(m.decoder.shape, rows, 64, page_size=page_size, pages=pages)
    sample = parameters(rows, temperature=options.pop("temperature", 1.0), **options.pop("sampling", {}))
    return entropix_search.start(
        m.decoder,
        m.params,
        controller,
        pool,
        texts,
        plan,
        key=jax.random.key(7),
        sample=sample,
        **{"max_tokens": TOKENS, "stop": [(-1, -1)] * rows, **options},
    )


def run_steps(search, plan: SearchPlan, controller, steps: int):
    m = tiny.model()
    return entropix_search.generate(m.decoder, m.params, controller, search, steps, plan=plan)


def finish(search, plan: SearchPlan, controller, steps: int = 300):
    """Run to the end, `steps` a launch; pages are counted after each."""
    for _ in range(2 + 300 // steps):
        search = run_steps(search, plan, controller, steps)
        cache.check(search.state.cache)
        if not (np.asarray(search.state.status) == RUNNING).any():
            break
    return search


def tokens(search, plan: SearchPlan) -> list[list[int]]:
    return [trace.token.tolist() for trace in entropix_search.traces(search, plan)]


def assert_true_to_the_model(prompt: list[int], trace) -> None:
    """Check the measurements along a text against one forward pass over the text."""
    m, text = tiny.model(), trace.token.tolist()
    pool = allocate(m.decoder.shape, 1, 64, page_size=4)
    state = start(m.decoder, m.params, chain(), pool, [prompt], key=jax.random.key(0), max_tokens=40)
    _, forced = loop.replay(m.decoder, m.params, chain(), state, jnp.array([text], jnp.int32))
    np.testing.assert_allclose(trace.surprisal, forced.surprisal[:, 0], atol=2e-3)
    np.testing.assert_allclose(trace.entropy, forced.entropy[:, 0], atol=2e-3)
    fall = np.maximum(0, -np.diff(trace.entropy)).sum()
    np.testing.assert_allclose(trace.entropic_time[-1], fall, atol=1e-2)


@pytest.mark.slow
def test_without_branches_it_is_the_loop():
    plan, controller, texts = ALONE, law(thresholds=forcing(ADAPT)), tiny.prompts(9, 14)
    actual = tokens(finish(begin(texts, plan, controller), plan, controller), plan)
    plain, _, _ = tiny.finish(
        tiny.begin(texts, controller=controller, max_tokens=TOKENS), controller=controller
    )
    assert actual == plain


def alone(prompt, branch_of: int, slot: int, steps: int, controller):
    """A branch as a separate sequence: the prompt plus the candidate, a seed, and a number of steps."""
    m = tiny.model()
    pool = allocate(m.decoder.shape, 1, 64, page_size=4)
    seed = int(np.int64(branch_of + slot * SEED).astype(np.int32))  # wraps around
    state = start(
        m.decoder, m.params, controller, pool, [prompt], key=jax.random.key(7), max_tokens=40, seeds=[seed]
    )
    state, trace = loop.generate(m.decoder, m.params, controller, state, steps, capacity=64)
    trace = jax.tree.map(lambda x: np.asarray(x)[:steps, 0], trace)
    return trace, jax.tree.map(lambda x: np.asarray(x)[0], find_entropix_state(state.control))


@pytest.mark.exhaustive
@pytest.mark.parametrize("look", [False, True])
def test_the_best_branch_goes_on(look):
    plan = PLAN
    controller = law(thresholds=forcing(ADAPT if look else EXPLORE))
    texts, steps = tiny.prompts(9, 14), 1 if look else 4
    search = run_steps(begin(texts, plan, controller), plan, controller, 1 + steps)
    cache.check(search.state.cache)
    for number, prompt in enumerate(texts):
        first, said = alone(prompt, number, 0, 1, controller)
        values, continuations = [], []
        for slot, candidate in enumerate(said.candidates[:3]):
            trace, after = alone([*prompt, int(candidate)], number, slot, steps, controller)
            log_p = np.r_[said.log_probability[slot], -trace.surprisal]
            entropies = np.r_[first.entropy, trace.entropy]
            rise = np.maximum(0, -np.diff(entropies)).sum()
            value = log_p[0] + after.confidence if look else (log_p.sum() + 0.5 * rise) / (steps + 1)
            values.append(float(value))
            continuations.append([int(candidate), *trace.token.tolist()])
        best = continuations[int(np.argmax(values))]
        text = tokens(search, plan)[number]
        # One step ahead, the next fork has been made already: the token after is one of its candidates.
        assert text[: len(best) - look] == best[: len(best) - look], values
    tally = jax.device_get(search.counts)
    assert (tally.looked >= 1).all() if look else (tally.explored == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("quadrants", [EXPLORE, *exhaustive(ADAPT, RESAMPLE)])
def test_texts_are_true_to_the_model_and_costs_are_paid(quadrants):
    plan, controller = PLAN, law(thresholds=forcing(quadrants))
    texts = tiny.prompts(9, 14)
    search = finish(begin(texts, plan, controller), plan, controller)
    for prompt, trace in zip(texts, entropix_search.traces(search, plan), strict=True):
        assert len(trace.token) == TOKENS
        assert_true_to_the_model(prompt, trace)
    tally = jax.device_get(search.counts)
    happened = {EXPLORE: tally.explored, ADAPT: tally.looked, RESAMPLE: tally.returned}[quadrants]
    assert (happened > 0).all()
    assert (tally.discarded > 0).all() or quadrants == ADAPT
    start = tiny.begin(texts, controller=controller, max_tokens=TOKENS)
    _, plain, _ = tiny.finish(start, controller=controller)
    assert (np.asarray(search.state.ledger.flops[::3]) > np.asarray(plain.ledger.flops)).all()
    generated = np.asarray(search.state.history.generated[::3])
    for row, trace in zip(generated, entropix_search.traces(search, plan), strict=True):
        np.testing.assert_array_equal(row, np.bincount(trace.token, minlength=96))
    emptied = cache.release_rows(search.state.cache, jnp.ones(6, bool))
    assert int(emptied.available) == emptied.pages


@pytest.mark.slow
def test_the_token_taken_back_is_drawn_otherwise():
    plan, controller = ALONE, law(thresholds=forcing(RESAMPLE))
    texts = tiny.prompts(9, 14)
    without, _, _ = tiny.finish(
        tiny.begin(texts, controller=controller, max_tokens=TOKENS), controller=controller
    )
    search = begin(texts, plan, controller)
    search = run_steps(search, plan, controller, 3)
    # Both tokens were uncertain; at the second, the first was taken back and drawn anew.
    text = tokens(search, plan)[0]
    assert int(search.counts.returned[0]) == 1 and text[0] != without[0][0]
    assert int(search.counts.discarded[0]) == 2


@pytest.mark.exhaustive
def test_nothing_that_is_settled_changes():
    plan, controller = PLAN, law(thresholds=Thresholds(0.3, 9.0, 2.0, 0.2, 2.5))
    texts = tiny.prompts(9, 14)
    search = begin(texts, plan, controller)
    known: list[list[int]] = [[], []]
    while (np.asarray(search.state.status) == RUNNING).any():
        search = run_steps(search, plan, controller, 3)
        last = entropix_search.final_positions(search, plan)
        for number, text in enumerate(tokens(search, plan)):
            final = text[: max(0, int(last[number]) - len(texts[number]) + 1)]
            assert final[: len(known[number])] == known[number]
            known[number] = final
    assert known == tokens(search, plan) and all(len(text) == TOKENS for text in known)
    once = finish(begin(texts, plan, controller), plan, controller)
    assert tokens(once, plan) == known  # however many steps a launch has
    single = [
        tokens(finish(begin([t], plan, controller, seeds=[i]), plan, controller), plan)[0]
        for i, t in enumerate(texts)
    ]
    assert single == known  # whatever the neighbours


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    spare=st.integers(0, 30),
    steps=st.sampled_from([1, 2, 7]),
    high=st.sampled_from([1.0, 2.0, 2.6]),
    torn=st.sampled_from([0.5, 2.0, 3.0]),
    stop=st.integers(0, 95),
    seed=st.integers(0, 3),
)
def test_no_page_is_lost_however_it_goes(spare, steps, high, torn, stop, seed):
    """With scarce pages, ends within branches, and launches of any length."""
    plan = PLAN
    controller = law(thresholds=Thresholds(0.2, 9.0, high, 0.1, torn))
    texts = tiny.prompts(9, 14, seed=seed)
    rows = [()] * 6
    rows[0] = rows[3] = (stop, (stop + 11) % 96)
    search = begin(texts, plan, controller, stop=rows)
    # One program for every size of pool: the host keeps what is not to be had.
    pool = search.state.cache
    left = int(pool.available)
    kept = np.asarray(pool.free)[min(spare, left) : left].tolist()
    pool = cache.retain(pool, jnp.array(kept + [pool.pages] * (pool.pages - len(kept)), jnp.int32))
    pool = pool._replace(available=jnp.int32(left - len(kept)))
    search = search._replace(state=search.state._replace(cache=pool))
    for _ in range(12):
        search = run_steps(search, plan, controller, steps)
        cache.check(search.state.cache, kept)
        left, alive = np.asarray(search.steps_left), np.asarray(search.alive).reshape(2, 3)
        granted = np.asarray(search.state.cache.granted).reshape(2, 3)
        assert (granted[left == 0, 1:] == 0).all() and not alive[left == 0, 1:].any()
    search = run_steps(search, plan, controller, 200)
    for prompt, trace in zip(texts, entropix_search.traces(search, plan), strict=True):
        if len(trace.token) == TOKENS:  # those that found pages to the end
            assert_true_to_the_model(prompt, trace)
    emptied = cache.release_rows(search.state.cache, jnp.ones(6, bool))
    cache.check(emptied, kept)
    assert int(emptied.available) == emptied.pages - len(kept)


@pytest.mark.slow
def test_greedy_rows_do_not_search():
    plan, controller, texts = PLAN, law(thresholds=forcing(EXPLORE)), tiny.prompts(9, 14)
    search = finish(begin(texts, plan, controller, temperature=0.0), plan, controller)
    plain, _, _ = tiny.finish(tiny.begin(texts, temperature=0.0, max_tokens=TOKENS))
    assert tokens(search, plan) == plain
    assert not any(np.asarray(x).any() for x in search.counts)


@pytest.mark.slow
def test_no_copy_of_the_cache_in_a_launch():
    controller = law(thresholds=forcing(EXPLORE))
    search = begin(tiny.prompts(9, 14), PLAN, controller)
    shape = ",".join(map(str, search.state.cache.layers[0].keys.shape))
    lowered = entropix_search.generate.lower(
        tiny.model().decoder, tiny.model().params, controller, search, 3, plan=PLAN
    )
    text = lowered.compile().as_text()
    assert f"f32[{shape}]" in text, "the shape of the pool does not occur: the test looks for the wrong thing"
    copies = re.findall(rf"= f32\[{shape}\]\S* (?:copy|select|transpose|copy-start)\(.*", text)
    assert not copies, copies


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(branches=0), "branches must be an integer of at least 1; got 0"),
        (dict(length=0), "length must be an integer of at least 1; got 0"),
    ],
)
def test_plans_that_cannot_be(change, said):
    with pytest.raises(ValueError, match=said):
        SearchPlan(**change)


def test_what_cannot_be_searched():
    plan = SearchPlan(branches=2)
    with pytest.raises(ValueError, match="controller must contain an Entropix"):
        begin(tiny.prompts(5), plan, chain())
    m = tiny.model()
    pool = allocate(m.decoder.shape, 3, 16, page_size=4)
    options = dict(key=jax.random.key(0), max_tokens=4)
    with pytest.raises(ValueError, match="cache must have 2 rows, 2 for each prompt; got 3"):
        entropix_search.start(m.decoder, m.params, law(), pool, [[1]], plan, **options)
    with pytest.raises(ValueError, match="none empty"):
        entropix_search.start(m.decoder, m.params, law(), pool, [[]], plan, **options)
