"""What `sample` does in rarer branches: a limit of surprisal, greedy rows, a list of tokens, other keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.sampling import parameters, sample, sampler
from entropic_jax.sampling.truncation import asks_for_truncation

ROWS, VOCABULARY = 4, 24
LOGITS = 3 * np.random.default_rng(0).standard_normal((ROWS, VOCABULARY)).astype(np.float32)


def test_rows_that_are_greedy_or_ask_for_nothing_take_no_truncation():
    logits, no_limit = jnp.asarray(LOGITS), jnp.full(ROWS, jnp.inf)
    greedy, warm = jnp.zeros(ROWS), jnp.zeros(ROWS).at[1].set(0.5)
    plain, asking = parameters(ROWS), parameters(ROWS, top_k=3)
    for limit in (None, no_limit):
        assert not sampler._truncates(logits, plain, warm, limit)
        assert not sampler._truncates(logits, asking, greedy, limit)
        assert sampler._truncates(logits, asking, warm, limit)
    assert not sampler._truncates(logits, plain, warm, no_limit.at[0].set(1.0))  # of a greedy row
    assert sampler._truncates(logits, plain, warm, no_limit.at[1].set(1.0))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_above_the_limit_of_surprisal_are_left_out_but_for_the_likeliest(temperature):
    limit = np.float32([0.0, 1.5, 3.0, np.inf])
    surprisal = -np.asarray(jax.nn.log_softmax(LOGITS / temperature))
    kept = sampler._limit_surprisal(jnp.asarray(LOGITS / temperature), jnp.asarray(limit)) > -jnp.inf
    expected = (surprisal <= limit[:, None]) | (surprisal == surprisal.min(1, keepdims=True))
    np.testing.assert_array_equal(kept, expected)
    assert expected.sum(1).tolist()[0] == 1 and 1 < expected[2].sum() < VOCABULARY and expected[3].all()

    @jax.jit
    def draw(position):
        places = jnp.arange(ROWS), jnp.full(ROWS, position)
        warmth = jnp.full(ROWS, temperature)
        return sample(jnp.asarray(LOGITS), parameters(ROWS), warmth, jax.random.key(0), *places, limit)

    tokens = np.asarray(jax.lax.map(draw, jnp.arange(300)))
    for row in range(ROWS):
        drawn = set(tokens[:, row].tolist())
        assert drawn <= set(np.flatnonzero(expected[row]).tolist())
    assert len(set(tokens[:, 2].tolist())) > 1


@pytest.mark.slow
def test_a_list_of_tokens_draws_what_all_tokens_would_and_needs_a_threefry_key():
    numbers = jnp.array([2, 3, 7, 20], jnp.int32)
    masked = jnp.full((ROWS, VOCABULARY), -jnp.inf).at[:, numbers].set(LOGITS[:, numbers])
    rows, warmth = jnp.arange(ROWS), jnp.float32([0.0, 0.5, 1.0, 1.5])
    for position in range(20):
        rest = (parameters(ROWS), warmth, jax.random.key(3), rows, jnp.full(ROWS, position))
        listed = sample(masked[:, numbers], *rest, numbers=numbers)
        np.testing.assert_array_equal(listed, sample(masked, *rest))
    rest = (parameters(ROWS), warmth, jax.random.key(3, impl="rbg"), rows, rows)
    tokens = np.asarray(sample(masked, *rest))
    assert set(tokens.tolist()) <= set(numbers.tolist()) and tokens[0] == np.argmax(masked[0])
    with pytest.raises(ValueError, match="key must be a Threefry key for a list of tokens; got key<rbg>"):
        sample(masked[:, numbers], *rest, numbers=numbers)


@pytest.mark.parametrize(
    ("change", "asks"),
    [
        (dict(), False),
        (dict(top_k=1), True),
        (dict(top_k=VOCABULARY - 1), True),
        (dict(top_k=VOCABULARY), False),
        (dict(top_p=0.999), True),
        (dict(min_p=0.01), True),
        (dict(top_n_sigma=1.5), True),
        (dict(typical_p=0.99), True),
    ],
)
def test_a_row_asks_for_truncation_where_a_parameter_may_leave_out_a_token(change, asks):
    rows = {name: [value, getattr(parameters(1), name)[0].item()] for name, value in change.items()}
    assert asks_for_truncation(parameters(2, **rows), VOCABULARY).tolist() == [asks, False]
