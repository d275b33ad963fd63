"""DRY, the penalty on tokens that go on repeating a run, against a search over the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax.parameter_tables.sampling_params import PARAMETERS
from entropic_jax.sampling import history, latest_of, parameters, penalise, record
from entropic_jax.sampling.processors import LONGEST_RUN, WINDOW

VOCABULARY = 11


def expected(text: list[int], multiplier: float, base: float, allowed: int) -> np.ndarray:
    """The penalty of every token."""
    penalty = np.zeros(VOCABULARY)
    latest = text[-WINDOW:]
    for end in range(1, len(latest)):
        run = 0
        while run < min(end, LONGEST_RUN) and latest[end - 1 - run] == latest[-1 - run]:
            run += 1
        if run >= allowed:
            penalty[latest[end]] = max(penalty[latest[end]], multiplier * base ** (run - allowed))
    return penalty


def history_after(prompts: list[list[int]], tokens: np.ndarray, active: np.ndarray, together: int):
    """The history of rows with prompts after tokens `[n, rows]`, entered some at a time."""
    rows = len(prompts)
    result = history(rows, VOCABULARY)._replace(
        latest=jnp.asarray(np.stack([latest_of(prompt) for prompt in prompts])),
        number=jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
    )
    enter = jax.jit(record)
    for first in range(0, len(tokens), together):
        pieces = tokens[first : first + together], active[first : first + together]
        result = enter(result, *(jnp.asarray(x if together > 1 else x[0]) for x in pieces))
    return result


@pytest.mark.parametrize("together", [1, 4])
def test_the_penalty_is_that_of_the_longest_run_before_each_token(together):
    rng = np.random.default_rng(0)
    for length, alphabet in ((0, 2), (1, 2), (3, 2), (40, 2), (250, 3), (300, 2), (520, VOCABULARY)):
        prompts = [rng.integers(0, alphabet, length).tolist() for _ in range(3)]
        prompts[2] = ([4, 5, 6] * length)[:length]  # loops
        tokens = rng.integers(0, alphabet, (24, 3))
        tokens[:, 2] = ([4, 5, 6] * 24)[:24]
        active = rng.random((24, 3)) < 0.8
        if together > 1:  # those that a row emits come first
            active = np.sort(active.reshape(-1, together, 3), 1)[:, ::-1].reshape(24, 3)
        after = history_after(prompts, tokens, active, together)
        values = dict(
            dry_multiplier=[0.8, 0.0, 0.3], dry_base=[1.75, 1.75, 1.2], dry_allowed_length=[2, 1, 4]
        )
        logits = rng.standard_normal((3, VOCABULARY)).astype(np.float32)
        actual = np.asarray(penalise(jnp.asarray(logits), parameters(3, **values), after))
        for row in range(3):
            text = [*prompts[row], *tokens[active[:, row], row].tolist()]
            drop = expected(text, *(values[name][row] for name in values))
            np.testing.assert_allclose(actual[row], logits[row] - drop, rtol=1e-5)
        np.testing.assert_array_equal(actual[1], logits[1])


def test_a_masked_token_stays_masked_and_a_loop_ends():
    text = [1, 2, 3] * 4
    state = history_after([text], np.zeros((0, 1), int), np.zeros((0, 1), bool), 1)
    logits = jnp.full((1, VOCABULARY), -jnp.inf).at[0, 1].set(9.0).at[0, 5].set(0.0)
    actual = np.asarray(penalise(logits, parameters(1, dry_multiplier=1.0), state))
    assert actual.argmax() == 5 and np.isneginf(actual[0, [0, 2, 3, 4]]).all()


def test_the_table_allows_no_run_that_is_longer_than_those_compared():
    assert PARAMETERS["dry_allowed_length"].accepts.high == LONGEST_RUN
    assert f"latest {WINDOW} tokens" in PARAMETERS["dry_multiplier"].help
