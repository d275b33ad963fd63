"""Sampling against NumPy; independence of rows, skipped work, and no retracing."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax.extend.core import jaxprs_in_params

from entropic_jax import sampling

ROWS, VOCABULARY = 4, 61  # a vocabulary that fills no vector register evenly
KEY = jax.random.key(7)

truncate = jax.jit(sampling.truncate)
penalise = jax.jit(sampling.penalise)
sample = jax.jit(sampling.sample)


def random_logits(seed: int, rows: int = ROWS, vocabulary: int = VOCABULARY) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((rows, vocabulary))).astype(np.float32)


def kept(logits: np.ndarray, **filters) -> np.ndarray:
    return np.isfinite(truncate(jnp.asarray(logits), sampling.parameters(len(logits), **filters)))


def draw(logits, params, temperature, seed=None, position=None, key=KEY) -> np.ndarray:
    rows = len(logits)
    seed = np.arange(rows) if seed is None else seed
    position = np.zeros(rows) if position is None else position
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), rows)
    return np.asarray(
        sample(
            jnp.asarray(logits),
            params,
            temperature,
            key,
            jnp.asarray(seed, jnp.int32),
            jnp.asarray(position, jnp.int32),
        )
    )


def check_distribution(logits, expected, *, temperature, draws=4096, **filters):
    """A chi-square test of `draws` tokens against the probabilities `expected`, six sigma wide."""
    vocabulary = logits.shape[-1]
    tokens = draw(
        np.broadcast_to(logits, (draws, vocabulary)),
        sampling.parameters(draws, **filters),
        temperature,
        seed=np.arange(draws) // 64,
        position=np.arange(draws) % 64,
    )
    counts = np.bincount(tokens, minlength=vocabulary)
    expected = draws * np.ravel(expected)
    assert counts[expected == 0].sum() == 0
    rare = expected < 8  # pooled, as the approximation needs counts of some size
    pooled = (
        np.append(counts[~rare], counts[rare].sum()),
        np.append(expected[~rare], expected[rare].sum() + 1e-9),
    )
    statistic = np.sum((pooled[0] - pooled[1]) ** 2 / np.maximum(pooled[1], 1))
    freedom = len(pooled[0]) - 1
    assert statistic < freedom + 6 * np.sqrt(2 * freedom) + 6, (statistic, freedom)


def test_the_distribution_is_the_truncated_softmax():
    logits = random_logits(6, rows=1)
    scores = np.where(kept(logits / np.float32(0.8), top_k=20, top_p=0.9), logits / 0.8, -np.inf)
    expected = np.exp(scores - scores.max())
    check_distribution(logits, expected / expected.sum(), temperature=0.8, top_k=20, top_p=0.9)


def test_penalties_and_bias_follow_their_formula():
    logits, rng = random_logits(8), np.random.default_rng(1)
    count = rng.poisson(0.5, (ROWS, VOCABULARY)).astype(np.int32)
    prompt = rng.random((ROWS, VOCABULARY)) < 0.2
    repetition, presence, frequency = np.array(
        [[1.0, 1.2, 1.0, 0.9], [0.5, 0.0, 0, -1], [0.0, 0.3, 0, 0.1]], np.float32
    )
    bias = [{3: 5.0, 60: -2.0}, None, {}, {0: -np.inf}]
    params = sampling.parameters(
        ROWS,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    seen = prompt | (count > 0)
    factor = np.where(seen, repetition[:, None], 1)
    expected = np.where(logits > 0, logits / factor, logits * factor)
    expected = expected - presence[:, None] * (count > 0) - frequency[:, None] * count
    expected[0, 3] += 5
    expected[0, 60] -= 2
    expected[3, 0] = -np.inf
    actual = np.asarray(penalise(logits, params, history_of(prompt, count)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(actual[2], logits[2])


def history_of(prompt, count):
    """A history with these counts and no latest tokens."""
    blank = sampling.history(*np.shape(count))
    return blank._replace(prompt=jnp.asarray(prompt), generated=jnp.asarray(count))


def test_a_biased_token_outside_the_vocabulary_has_no_effect():
    logits = random_logits(9)
    params = sampling.parameters(ROWS, logit_bias={VOCABULARY: 3.0})
    np.testing.assert_array_equal(penalise(logits, params, sampling.history(ROWS, VOCABULARY)), logits)


def test_record_counts_the_tokens_of_active_rows():
    history = sampling.history(ROWS, VOCABULARY)
    record = jax.jit(sampling.record)
    tokens, active = jnp.array([3, 3, -1, VOCABULARY], jnp.int32), jnp.array([True, False, True, True])
    history = record(record(history, tokens, active), tokens, active)
    assert history.generated[0, 3] == history.generated.sum() == 2
    assert not history.prompt.any()


# Properties.

finite_or_masked = st.one_of(
    st.floats(-40, 40, width=32, allow_subnormal=False), st.just(-np.inf), st.just(0.0), st.just(-0.0)
)
rows_of_logits = arrays.arrays(np.float32, (ROWS, VOCABULARY), elements=finite_or_masked).map(
    lambda a: np.where(np.isneginf(a).all(1, keepdims=True), 0, a).astype(np.float32)
)
unit = st.floats(0, 1, width=32, allow_subnormal=False)
probability = st.floats(0, 1, exclude_min=True, width=32, allow_subnormal=False)


def expected_top_p(logits: np.ndarray, p: float, slack: float) -> np.ndarray:
    """Tokens with less than p + slack above them, in float64; a positive slack also admits near-ties."""
    ratio = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    ratio /= ratio.sum(1, keepdims=True)
    above = np.sum(
        np.where(logits[:, None, :] > logits[:, :, None] + max(slack, 0), ratio[:, None, :], 0), axis=-1
    )
    return (above < p + slack) & np.isfinite(logits)


@settings(max_examples=60)
@given(rows_of_logits, probability)
def test_top_p_keeps_the_smallest_set_with_all_its_ties(logits, p):
    actual = kept(logits, top_p=p)
    most = logits == logits.max(1, keepdims=True)
    assert (actual <= (expected_top_p(logits, p, 1e-5) | most)).all()
    assert (actual >= (expected_top_p(logits, p, -1e-5) | most)).all()


@settings(max_examples=60)
@given(rows_of_logits, st.integers(0, VOCABULARY + 2))
def test_top_k_keeps_k_and_ties(logits, k):
    above = np.sum(logits[:, None, :] > logits[:, :, None], axis=-1)
    expected = (above < (k or VOCABULARY)) & np.isfinite(logits)
    np.testing.assert_array_equal(kept(logits, top_k=k), expected)


@pytest.mark.parametrize("n", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_top_n_sigma_keeps_the_same_tokens_at_every_temperature(n, temperature):
    logits = np.random.default_rng(5).standard_normal((3, 200)).astype(np.float32)
    logits[1, ::2] = -np.inf
    real = np.where(np.isfinite(logits), np.float64(logits), np.nan)
    floor = np.nanmax(real, -1) - n * np.nanstd(real, -1)
    kept = sampling.truncate(jnp.asarray(logits) / temperature, sampling.parameters(3, top_n_sigma=n))
    np.testing.assert_array_equal(np.isfinite(kept), logits >= floor[:, None])


@settings(max_examples=60)
@given(rows_of_logits, st.integers(0, VOCABULARY), probability, unit, probability)
def test_filters_keep_a_token_and_do_not_touch_what_they_keep(logits, k, top_p, min_p, typical_p):
    params = sampling.parameters(ROWS, top_k=k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    actual = np.asarray(truncate(logits, params))
    assert np.isfinite(actual).any(1).all()
    assert ((actual == logits) | np.isneginf(actual)).all()


@settings(max_examples=40)
@given(rows_of_logits, st.floats(0, 5, width=32), probability, st.integers(0, 2**31 - 1))
def test_a_masked_token_is_never_drawn(logits, temperature, top_p, seed):
    tokens = draw(logits, sampling.parameters(ROWS, top_p=top_p), temperature, seed=np.full(ROWS, seed))
    assert np.isfinite(logits[np.arange(ROWS), tokens]).all()


def test_temperature_zero_is_argmax_whatever_the_filters():
    logits = np.round(random_logits(10))  # with ties: the first one is taken
    params = sampling.parameters(ROWS, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.2)
    for temperature in (np.zeros(ROWS), np.array([0, 1, 0, 1])):
        greedy = temperature == 0
        actual = draw(logits, params, temperature)
        np.testing.assert_array_equal(actual[greedy], np.argmax(logits, -1)[greedy])


@pytest.mark.parametrize("temperature", [1e-38, 1e-6])
def test_a_tiny_temperature_does_not_overflow(temperature):
    logits = random_logits(11)
    np.testing.assert_array_equal(
        draw(logits, sampling.parameters(ROWS, top_p=0.9), temperature), logits.argmax(-1)
    )


# Independence of the rows.

VARIED = dict(
    temperature=[0.0, 1.0, 0.7, 2.0],
    top_k=[0, 5, 0, 0],
    top_p=[1.0, 1.0, 0.8, 1.0],
    min_p=[0.0, 0.0, 0.0, 0.02],
    typical_p=[1.0, 1.0, 1.0, 0.9],
    repetition_penalty=[1.0, 1.0, 1.0, 1.5],
    presence_penalty=[0.0, 0.0, 0.5, 0.0],
)


def row_at(row: int, neighbours: dict) -> dict:
    """`VARIED` at `row`, `neighbours` elsewhere."""
    return {
        name: [VARIED[name][row] if r == row else neighbours.get(name, VARIED[name])[r] for r in range(ROWS)]
        for name in VARIED
    }


@pytest.mark.parametrize("row", range(ROWS))
def test_a_row_does_not_depend_on_its_neighbours(row):
    logits, other = random_logits(12), random_logits(13)
    off = sampling.parameters(ROWS, temperature=0.0)
    quiet = {name: getattr(off, name).tolist() for name in VARIED}
    poisoned = other.copy()
    poisoned[:, ::7] = np.nan
    count = jnp.asarray(np.random.default_rng(2).poisson(0.3, (ROWS, VOCABULARY)), jnp.int32)
    history = history_of(count > 1, count)
    actual = []
    for neighbours, beside in (({}, logits), (quiet, logits), ({}, other), ({}, poisoned)):
        params = sampling.parameters(ROWS, **row_at(row, neighbours))
        mixed = np.where(np.arange(ROWS)[:, None] == row, logits, beside)
        adjusted = penalise(mixed, params, history)
        truncated = truncate(adjusted, params)
        tokens = [draw(adjusted, params, params.temperature, None, np.full(ROWS, p))[row] for p in range(16)]
        actual.append((np.asarray(adjusted[row]), np.asarray(truncated[row]), tokens))
    for case in actual[1:]:
        for a, b in zip(case, actual[0], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_row_does_not_depend_on_its_place_nor_on_the_number_of_rows():
    logits = random_logits(14)
    params = sampling.parameters(ROWS, **VARIED)
    position = np.array([3, 0, 9, 4])
    together = draw(logits, params, params.temperature, seed=np.arange(ROWS), position=position)
    for row in range(ROWS):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], params)
        token = draw(
            logits[row : row + 1], alone, alone.temperature, seed=[row], position=position[row : row + 1]
        )
        assert token[0] == together[row]


def test_seed_and_position_and_key_each_change_the_draw():
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    params, base = sampling.parameters(ROWS), np.arange(ROWS)
    first = draw(logits, params, 1.0, seed=base)
    np.testing.assert_array_equal(first, draw(logits, params, 1.0, seed=base))
    for other in (
        draw(logits, params, 1.0, seed=base - 100),
        draw(logits, params, 1.0, seed=base, position=np.ones(ROWS)),
        draw(logits, params, 1.0, seed=base, key=jax.random.key(8)),
    ):
        assert (first != other).any()


def test_nan_does_not_hang_and_gives_a_valid_token():
    logits = np.full((ROWS, VOCABULARY), np.nan, np.float32)
    logits[1, 1:], logits[2] = 1.0, -np.inf
    params = sampling.parameters(ROWS, top_k=3, top_p=0.5, min_p=0.1, typical_p=0.2)
    for temperature in (1.0, 0.0, np.nan):
        tokens = draw(logits, params, temperature)
        assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
    assert np.isnan(truncate(logits, params)[0]).all()


# What is compiled.


def test_new_parameters_do_not_retrace():
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(sampling.sample, n=1))
    zeros = jnp.zeros(ROWS, jnp.int32)
    for params in (
        sampling.parameters(ROWS, temperature=0.0),
        sampling.parameters(ROWS, top_k=4, logit_bias={1: 2.0}),
        sampling.parameters(ROWS, top_p=0.5, min_p=0.1),
        sampling.parameters(ROWS, **VARIED),
    ):
        traced(jnp.asarray(random_logits(0)), params, params.temperature, KEY, zeros, zeros)


@partial(jax.jit, donate_argnums=(2,))
def decode(logits, params, history, temperature, steps):
    """A decode loop like that of generation."""
    rows = logits.shape[0]
    seed = jnp.arange(rows, dtype=jnp.int32)

    def body(carry):
        step, history, _ = carry
        adjusted = sampling.penalise(logits, params, history)
        position = jnp.full(rows, step, jnp.int32)
        token = sampling.sample(adjusted, params, temperature, KEY, seed, position)
        return step + 1, sampling.record(history, token, jnp.ones(rows, bool)), token

    return jax.lax.while_loop(
        lambda carry: carry[0] < steps, body, (jnp.int32(0), history, jnp.zeros(rows, jnp.int32))
    )


def test_in_a_loop_the_history_is_never_copied():
    params = sampling.parameters(ROWS)._replace(frequency_penalty=jnp.full(ROWS, 100.0))
    temperature, history = jnp.zeros(ROWS, jnp.float32), sampling.history(ROWS, VOCABULARY)
    text = decode.lower(jnp.asarray(random_logits(0)), params, history, temperature, 5).compile().as_text()
    assert text
    counts = f"s32[{ROWS},{VOCABULARY}]"
    assert counts in text
    assert not [line for line in text.splitlines() if " copy(" in line and counts in line]
    logits = random_logits(15)
    _, history, _ = decode(jnp.asarray(logits), params, history, temperature, 5)
    best = np.argsort(-logits, axis=-1)[:, :5]  # so large a penalty lets greedy decoding take each token once
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(history.generated), best, -1), 1)


def primitives(jaxpr, *, branches: bool) -> set[str]:
    """Names of the primitives in a jaxpr, with or without those in the branches of a cond."""
    names = {equation.primitive.name for equation in jaxpr.eqns}
    for equation in jaxpr.eqns:
        if branches or equation.primitive.name != "cond":
            for inner in jaxprs_in_params(equation.params):
                names |= primitives(inner, branches=branches)
    return names


def test_what_no_row_asks_for_is_behind_a_cond(monkeypatch):
    monkeypatch.setenv("ENTROPIC_KERNELS", "xla")
    zeros = jnp.zeros(ROWS, jnp.int32)
    params, logits = sampling.parameters(ROWS), jnp.asarray(random_logits(0))
    history = sampling.history(ROWS, VOCABULARY)
    for costly, function, arguments in (
        ({"shift_left", "log1p", "exp", "div"}, sampling.sample, (params.temperature, KEY, zeros, zeros)),
        ({"scatter-add", "div", "mul"}, sampling.penalise, (history,)),
        ({"exp", "scan"}, sampling.truncate, ()),
    ):
        trace = jax.make_jaxpr(lambda *x, f=function: f(*x))(logits, params, *arguments).jaxpr
        assert costly <= primitives(trace, branches=True)
        assert not costly & primitives(trace, branches=False)


def test_kept_logits_have_unit_gradient():
    logits = jnp.asarray(random_logits(16))
    params = sampling.parameters(ROWS, top_k=20, top_p=0.9, min_p=0.01, typical_p=0.9)
    inside = np.isfinite(truncate(logits, params))
    total = lambda logits: jnp.sum(jnp.where(inside, sampling.truncate(logits, params), 0.0))
    np.testing.assert_array_equal(jax.grad(total)(logits), inside)


# Errors.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(temperature=-1.0), "temperature must be a number between 0 and 1000; got -1.0"),
        (dict(temperature=float("nan")), "temperature must be .*; got nan"),
        (dict(top_k=2.5), "top_k must be an integer between -1 and 2147483647; got 2.5"),
        (dict(top_p=[0.5] * 3), r"top_p must have shape \(\) or \(\d+,\), one per row; got \(3,\)"),
        (dict(top_p=0.0), "top_p must be a number above 0 and at most 1; got 0.0"),
        (dict(min_p=1.1), "min_p must be .*; got 1.1"),
        (dict(typical_p=-0.1), "typical_p must be .*; got -0.1"),
        (dict(top_n_sigma=-1), "top_n_sigma must be a number between 0 and 1000; got -1"),
        (dict(repetition_penalty=0.0), "repetition_penalty must be a number between 0.001 and 1000; got 0"),
        (dict(presence_penalty=float("inf")), "presence_penalty must be .*; got inf"),
        (dict(logit_bias={-1: 1.0}), r"logit_bias must be .*; got \{-1: 1.0\}"),
        (dict(logit_bias={1: float("inf")}), r"logit_bias must be .*; got \{1: inf\}"),
        (dict(logit_bias=dict.fromkeys(range(9), 1.0)), "logit_bias must have at most bias_slots = 8 tokens"),
        (dict(logit_bias=[{}, {}]), "logit_bias must have .* entries, one per row; got 2"),
        (dict(logit_bias=3), "logit_bias must be a mapping, or .* of them; got 3"),
        (dict(bias_slots=0), "bias_slots must be an integer of at least 1; got 0"),
    ],
)
def test_errors_name_argument_value_and_what_is_accepted(arguments, message):
    with pytest.raises(ValueError, match=message):
        sampling.parameters(ROWS, **arguments)
