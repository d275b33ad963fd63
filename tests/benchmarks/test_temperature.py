"""The relative law and the controls of the benchmark of temperature laws."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sampling.temperature.controls import Constant, Delayed, Shuffled
from benchmarks.sampling.temperature.relative import OUTLIER, Relative
from entropic_jax.entropy import at_temperature
from entropic_jax.state import Action, Signal, plain_action, quiet_signal

ROWS, VOCABULARY = 8, 50
LAW = Relative(target_entropy=0.5, surprisal_deviations=0.75, correlation=0.4, scale=0.3)


def seen(seed: int) -> Signal:
    scale = jnp.linspace(0.5, 6.0, ROWS)[:, None]
    logits = scale * jax.random.normal(jax.random.key(seed), (ROWS, VOCABULARY))
    entropy = at_temperature(logits, jnp.ones(ROWS)).entropy
    return quiet_signal(ROWS)._replace(logits=logits, entropy=entropy, emitting=jnp.ones(ROWS, bool))


def decisions(law, steps: int = 4) -> list[Action]:
    action = plain_action(jnp.ones(ROWS))
    state, actions = law.init(action), []
    for step in range(steps):
        action, state = jax.jit(law.update)(seen(step), action, state)
        actions.append(action)
    return actions


def test_the_relative_law_cools_outliers_only_and_excludes_tokens_beyond_them():
    past, cooled = np.full(ROWS, 0.5), 0
    for step, action in enumerate(decisions(LAW)):
        limit = 0.5 + 0.4 * (past - 0.5) + OUTLIER * 0.3
        signal = seen(step)
        outlier = np.asarray(signal.entropy > limit)
        temperature = np.asarray(action.temperature)
        assert (temperature[~outlier] == 1).all() and (temperature[outlier] < 1).all()
        current = at_temperature(signal.logits, action.temperature)
        warm = outlier & (temperature > 0.31)  # above the lowest temperature
        np.testing.assert_allclose(np.asarray(current.entropy)[warm], limit[warm], atol=1e-3)
        excess = (action.surprisal_limit - current.entropy) / jnp.sqrt(current.varentropy)
        np.testing.assert_allclose(excess, 0.75, rtol=1e-2)
        past, cooled = np.asarray(signal.entropy), cooled + outlier.sum()
    assert 0 < cooled < 4 * ROWS


def test_controls_change_whose_decision_a_token_gets_and_nothing_else():
    plain, shuffled, late = decisions(LAW), decisions(Shuffled(LAW)), decisions(Delayed(LAW))
    for before, after, exchanged, delayed in zip(plain, plain[1:], shuffled[1:], late[1:], strict=False):
        np.testing.assert_array_equal(np.sort(exchanged.temperature), np.sort(after.temperature))
        assert (np.asarray(exchanged.surprisal_limit) != np.asarray(after.surprisal_limit)).any()
        np.testing.assert_array_equal(delayed.temperature, before.temperature)
        np.testing.assert_array_equal(delayed.surprisal_limit, before.surprisal_limit)
    constant = decisions(Constant(0.9, 3.0))[-1]
    assert set(constant.temperature.tolist()) == {np.float32(0.9)}
    assert set(constant.surprisal_limit.tolist()) == {3.0}
