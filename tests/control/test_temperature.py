"""Temperature laws against their formulas in float64, and their closed-loop guarantees."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import entropy, parameters
from entropic_jax.control import chain, update_rows
from entropic_jax.control.laws import LAWS
from entropic_jax.control.temperature import (
    EDT,
    DynaTemp,
    Exact,
    Integral,
    Mirostat,
    Normalised,
    Paper,
    solve_temperature,
)
from entropic_jax.sampling import sample
from entropic_jax.state import Signal, plain_action, quiet_signal
from tests import tiny

ROWS, VOCABULARY = 16, 67
GREEDY = 5  # a row
REQUESTED = 2.0  # temperature
GAINS = {name: {} if name in ("edt", "dynatemp") else {"target_entropy": 1.2} for name in LAWS}


def tempered(logits, temperature) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and varentropy of softmax(z / T), in float64."""
    z = np.asarray(logits, np.float64) / np.asarray(temperature, np.float64)[..., None]
    z = z - z.max(-1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    p = np.exp(log_p)
    information = np.where(p > 0, -log_p, 0.0)
    mean = (p * information).sum(-1)
    return mean, (p * (information - mean[..., None]) ** 2).sum(-1)


def bisected(logits, target, lowest=0.1, highest=2.0) -> np.ndarray:
    low, high = np.full(len(logits), math.log(lowest)), np.full(len(logits), math.log(highest))
    for _ in range(100):
        middle = (low + high) / 2
        above = tempered(logits, np.exp(middle))[0] > target
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return np.exp(high)


def held(step, temperature, varentropy, belief) -> np.ndarray:
    back = np.where(temperature < 1, step > 0, step < 0) & (belief >= 0.05)
    return np.clip(temperature * np.exp(np.where((varentropy >= 0.05) | back, step, 0)), 0.1, 2.0)


def expected(name: str, t, h, v, belief, logits, surprisal, limit) -> np.ndarray:
    """The output of the law: the surprisal limit for mirostat, else the temperature."""
    plain = tempered(logits, np.ones(len(t)))[0]
    step = -(h - 1.2)
    return {
        "paper": lambda: np.clip(t * np.exp(-0.02 * step), 0.1, 2.0),
        "integral": lambda: held(0.02 * step, t, v, belief),
        "normalised": lambda: held(np.clip(0.3 * step / np.maximum(v, 1.0), -0.2, 0.2), t, v, belief),
        "exact": lambda: bisected(logits, 1.2),
        "mirostat": lambda: limit - 0.1 * (surprisal - 1.2),
        "edt": lambda: np.maximum(0.8 ** (1.0 / plain), 0.1),
        "dynatemp": lambda: 0.1 + 1.9 * plain / np.log(np.isfinite(logits).sum(-1)),
    }[name]()


def random_logits(scale=3.0, rows: int = ROWS, seed: int = 0) -> np.ndarray:
    normal = np.random.default_rng(seed).standard_normal((rows, VOCABULARY))
    return (np.reshape(scale, (-1, 1)) * normal).astype(np.float32)


def seen(logits, temperature) -> Signal:
    """The signal that the loop would measure."""
    logits = jnp.asarray(logits, jnp.float32)
    belief, scaled = entropy.entropy_statistics(logits), entropy.at_temperature(logits, temperature)
    return quiet_signal(len(logits))._replace(
        entropy=belief.entropy,
        varentropy=belief.varentropy,
        tempered_entropy=scaled.entropy,
        tempered_varentropy=scaled.varentropy,
        emitting=jnp.ones(len(logits), bool),
        requested_temperature=jnp.full(len(logits), REQUESTED),
        logits=logits,
    )


@jax.jit
def act(law, signal, action):
    return update_rows(law, signal, action, law.init(action))[0]


@jax.jit
def _run(law, logits, start):
    def body(action, statistics):
        action = act(law, seen(statistics, action.temperature), action)
        return action, (action.temperature, entropy.at_temperature(statistics, action.temperature).entropy)

    return jax.lax.scan(body, plain_action(start), logits)[1]


def follow(law, logits, start=1.0) -> tuple[np.ndarray, np.ndarray]:
    """Temperatures, and the entropies they give, `[steps, rows]`, for logits `[steps, rows, vocabulary]`."""
    return jax.device_get(_run(law, logits, np.broadcast_to(np.float32(start), logits.shape[1:2])))


def fixed(logits, steps: int) -> np.ndarray:
    return np.broadcast_to(logits, (steps, *logits.shape))


@pytest.mark.parametrize("name", LAWS)
def test_laws_are_their_formulas(name):
    rng = np.random.default_rng(1)
    logits = random_logits(np.geomspace(0.3, 8, ROWS))
    logits[::3, 10:40] = -np.inf
    t = rng.uniform(0.15, 1.9, ROWS).astype(np.float32)
    h, surprisal, limit = (rng.uniform(0, 6, ROWS).astype(np.float32) for _ in range(3))
    v, belief = (10 ** rng.uniform(-3, 1, ROWS).astype(np.float32) for _ in range(2))
    signal = seen(logits, t)._replace(varentropy=belief, surprisal=surprisal)
    signal = signal._replace(tempered_entropy=h, tempered_varentropy=v)
    before = plain_action(t)._replace(surprisal_limit=limit)
    after = act(LAWS[name](**GAINS[name]), signal, before)
    written = "surprisal_limit" if name == "mirostat" else "temperature"
    formula = expected(name, *(np.float64(x) for x in (t, h, v, belief, logits, surprisal, limit)))
    np.testing.assert_allclose(getattr(after, written), formula, rtol=2e-4 if name == "exact" else 1e-5)
    for field in set(before._fields) - {written}:
        np.testing.assert_array_equal(getattr(after, field), getattr(before, field))


@pytest.mark.parametrize("name", LAWS)
def test_greedy_rows_stay_greedy_and_the_others_never_become_so(name):
    logits = random_logits()
    logits[3], logits[4, 1:] = 0, -np.inf
    start = jnp.ones(ROWS).at[GREEDY].set(0.0)
    temperatures, _ = follow(LAWS[name](**GAINS[name]), fixed(logits, 4), start)
    assert (temperatures[:, GREEDY] == 0).all()
    assert (np.delete(temperatures, GREEDY, axis=1) > 0).all()
    cold = {"lowest_temperature": 0.0} if name != "mirostat" else {}
    assert (follow(LAWS[name](**GAINS[name], **cold), fixed(logits, 4))[0] > 0).all()


@pytest.mark.parametrize("name", LAWS)
def test_what_is_no_number_changes_nothing_and_spoils_no_gradient(name):
    law = jax.tree.map(jnp.float32, LAWS[name](**GAINS[name]))
    logits = random_logits()
    signal = seen(logits, jnp.ones(ROWS))._replace(surprisal=jnp.full(ROWS, 2.0))
    before = plain_action(jnp.ones(ROWS))._replace(surprisal_limit=jnp.full(ROWS, 4.0))
    usual = act(law, signal, before)
    measures = {"entropy", "varentropy", "tempered_entropy", "tempered_varentropy", "surprisal"}

    @jax.jit
    def spoil(law, bad):
        wrong = {field: getattr(signal, field).at[3].set(bad) for field in measures}
        after = act(law, signal._replace(**wrong, logits=signal.logits.at[3].set(bad)), before)
        return after.temperature.sum() + after.surprisal_limit.sum(), after

    gradient = jax.jit(jax.grad(spoil, has_aux=True))
    for bad in (np.nan, np.inf, -np.inf):
        slopes, after = gradient(law, jnp.float32(bad))
        assert np.isfinite(jax.tree.leaves(slopes)).all()
        for actual, clean, old in zip(*map(jax.tree.leaves, (after, usual, before)), strict=True):
            assert actual[3] == old[3]
            np.testing.assert_allclose(np.delete(actual, 3), np.delete(clean, 3), rtol=1e-5)


@pytest.mark.parametrize("name", LAWS)
def test_rows_are_independent_and_have_gains_of_their_own(name):
    logits = fixed(random_logits(np.geomspace(0.5, 6, ROWS)), 3)
    field = "theta" if name == "edt" else "exponent" if name == "dynatemp" else "target_entropy"
    gains = jnp.linspace(0.5, 2.5, ROWS)
    together = follow(LAWS[name](**{field: gains}), logits)[0]
    for row in range(ROWS):
        others = np.where(np.arange(ROWS)[:, None] == row, logits, 0)  # uniform, which takes fewer iterations
        changed = follow(LAWS[name](**{field: gains}), others)[0]
        np.testing.assert_array_equal(together[:, row], changed[:, row])
    alone = follow(LAWS[name](**{field: float(gains[3])}), logits[:, 3:4])[0]
    np.testing.assert_allclose(together[:, 3], alone[:, 0], rtol=1e-5)


# Feedback.


def test_the_printed_law_is_positive_feedback():
    logits, solution = random_logits(), np.full(ROWS, 0.8, np.float32)
    targets = tempered(logits, solution)[0]
    start = solution * np.where(np.arange(ROWS) % 2, 1.02, 0.98).astype(np.float32)
    target = jnp.asarray(targets, jnp.float32)
    temperatures, entropies = follow(Paper(target, rate=0.1), fixed(logits, 300), start)
    distance = np.abs(np.log(temperatures / solution))
    inside = (temperatures[1:] > 0.1) & (temperatures[1:] < 2)
    assert (np.diff(distance, axis=0)[inside] > 0).all(), "each step leads further away"
    clip = np.where(np.arange(ROWS) % 2, 2.0, 0.1)
    np.testing.assert_allclose(temperatures[-1], clip, rtol=1e-6)
    assert (np.abs(entropies[-1] - targets) > 0.1).all()
    # The first step multiplies the error of ln T by 1 + η V.
    growth = distance[0] / np.abs(np.log(start / solution))
    np.testing.assert_allclose(growth, 1 + 0.1 * tempered(logits, solution)[1], rtol=0.02)
    corrected = follow(Integral(target, rate=0.1), fixed(logits, 100), start)[1]
    np.testing.assert_allclose(corrected[-1], targets, atol=1e-3)


def test_integral_converges_monotonically_up_to_the_greatest_rate():
    # For each row the largest varentropy that it meets on the way.
    logits, grid = random_logits(), np.geomspace(0.3, 1.5, 60)
    steepest = np.max([tempered(logits, np.full(ROWS, t))[1] for t in grid], axis=0)
    target = jnp.asarray(tempered(logits, np.full(ROWS, 0.8))[0], jnp.float32)
    rate = jnp.asarray(1 / steepest, jnp.float32)
    for start in (0.3, 1.5):
        temperatures, entropies = follow(Integral(target, rate), fixed(logits, 60), start)
        sign = 1 if start < 0.8 else -1
        assert (sign * np.diff(temperatures, axis=0) >= -1e-6).all()
        np.testing.assert_allclose(entropies[-1], target, atol=1e-3)
    swinging = follow(Integral(target, 2.5 * rate), fixed(logits, 60), 0.75)[0]
    assert (np.diff(np.sign(swinging - 0.8), axis=0) != 0).any(), "a larger rate overshoots"


@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_normalised_contracts_at_its_rate_whatever_the_slope(rate):
    logits = random_logits(np.geomspace(1, 6, ROWS))
    near = np.geomspace(0.6, 1.6, ROWS)
    h, v = tempered(logits, near)
    assert v.min() > 1 and v.max() > 2.5 * v.min(), "above V₀, and of different slopes"
    law = Normalised(jnp.asarray(h, jnp.float32), rate)
    _, entropies = follow(law, fixed(logits, 5), jnp.asarray(1.03 * near, jnp.float32))
    error = np.abs(entropies - h)
    np.testing.assert_allclose(error[2:4] / error[1:3], 1 - rate, atol=0.03)
    leap = follow(Normalised(0.0, rate=5.0), fixed(logits, 1), 1.0)[0]
    assert (np.abs(np.log(leap)) <= 0.2 + 1e-6).all() and leap.min() < 0.82


@pytest.mark.parametrize("law", [Integral(1.2, 0.1), Normalised(1.2), Exact(1.2)])
def test_laws_recover_at_once_from_a_long_saturation(law):
    usual = fixed(random_logits(3.0), 60)
    for scale, clip in ((0.4, 0.1), (12.0, 2.0)):
        short, long = (
            follow(law, np.concatenate([fixed(random_logits(scale), steps), usual]))[0]
            for steps in (100, 400)
        )
        stuck = (short[99] == np.float32(clip)) & (long[399] == np.float32(clip))
        assert stuck.sum() > ROWS // 4
        np.testing.assert_array_equal(short[99:, stuck], long[399:, stuck], "the length leaves no mark")
        assert (long[400, stuck] > clip).all() if clip < 1 else (long[400, stuck] < clip).all()
        reached = tempered(usual[0], long[400 if isinstance(law, Exact) else 459])[0]
        np.testing.assert_allclose(reached[stuck], 1.2, atol=0.1)


def test_no_step_is_taken_where_temperature_has_no_leverage():
    certain = np.zeros((2, VOCABULARY), np.float32)
    certain[0, 0] = 50  # one-hot; the other row is uniform
    for law in (Integral(1.0, 0.1), Normalised(1.0)):
        for start in (0.3, 1.0, 1.7):
            assert (follow(law, fixed(certain, 50), start)[0] == np.float32(start)).all()
    # So cold that V vanishes, for logits that temperature does move: the way back is open, the other is not.
    tied = random_logits(3.0, rows=2)
    tied.sort(axis=1)
    tied[:, -2] = tied[:, -1]
    tied[:, :-2] -= 2
    assert (tempered(tied, np.full(2, 0.12))[1] < 0.05).all()
    law = Integral(jnp.array([1.0, 0.5]), 0.1)
    temperatures, entropies = follow(law, fixed(tied, 200), 0.12)
    assert temperatures[0, 0] > 0.12 and math.isclose(entropies[-1, 0], 1.0, abs_tol=1e-2)
    assert (temperatures[:, 1] == np.float32(0.12)).all()


# The exact law.


def shapes() -> np.ndarray:
    """Distributions of many kinds, including one-hot, uniform and masked ones."""
    rng, token = np.random.default_rng(2), np.arange(VOCABULARY)
    only = lambda chosen, gap, otherwise=0.0: np.where(chosen, gap, otherwise)
    rows = [scale * rng.standard_normal(VOCABULARY) for scale in (0.1, 0.5, 1, 2, 4, 8, 16, 30)]
    rows += [-power * np.log1p(token) + offset for power in (0.5, 1, 2, 4) for offset in (0, 1e4)]
    for gap in (0.5, 2.0, 8.0, 25.0):  # the entropy is a staircase
        rows += [only(token == 7, gap), only(token < 3, gap)]
        rows.append(only(token < 2, 2 * gap) + only(token < 12, gap))
    rows += [only(token % 3 == 0, row, -np.inf) for row in rows]
    rows += [only(token < n, 0.0, -np.inf) for n in (1, 2, VOCABULARY)] + [only(token < 6, 0.0, -3e38)]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("clips", [(0.1, 2.0), (0.3, 1.2)])
def test_exact_reaches_every_target_between_the_clips(clips):
    logits = shapes()
    lower, upper = (tempered(logits, np.full(len(logits), t))[0] for t in clips)
    for share in (0.0, 1e-3, 0.02, 0.2, 0.5, 0.8, 0.98, 0.999, 1.0):
        target = jnp.asarray(lower + share * (upper - lower), jnp.float32)
        for start in (0.1, 0.7, 2.0):
            temperature = follow(Exact(target, *clips), logits[None], start)[0][0]
            reached = tempered(logits, temperature)[0]
            np.testing.assert_allclose(reached, target, atol=1e-3, err_msg=f"{share} from {start}")


def test_exact_stops_at_the_nearer_clip():
    logits = random_logits()
    lower, upper = (tempered(logits, np.full(ROWS, t))[0] for t in (0.1, 2.0))
    for clip, target in ((0.1, lower - 0.05), (2.0, upper + 0.05)):
        for start in (0.1, 1.0, 2.0):
            actual = follow(Exact(jnp.asarray(target, jnp.float32)), logits[None], start)[0][0]
            np.testing.assert_array_equal(actual, np.float32(clip))


def test_exact_is_differentiated_at_the_solution():
    logits = random_logits(2.0, rows=4)
    logits[0, 5:] = -np.inf
    logits[2, 1:] = -np.inf  # one-hot: no temperature reaches the target
    target = jnp.array([0.9, 1.5, 1.0, 1.0])
    start = jnp.array([1.0, 0.5, 1.0, 0.0])

    @jax.jit
    def solve(logits, target, highest=2.0):
        return solve_temperature(logits, target, start, jnp.full(4, 0.1), jnp.full(4, highest))

    slope = jax.grad(lambda t: solve(logits, t).sum())(target)
    actual = np.asarray(solve(logits, target))
    np.testing.assert_allclose(slope[:2], actual[:2] / tempered(logits[:2], actual[:2])[1], rtol=1e-3)
    assert slope[2] == 0 and slope[3] == 0
    assert jax.grad(lambda h: solve(logits, target, highest=h).sum())(2.0) == 1
    reverse = jax.grad(lambda z: solve(z, target).sum())(logits)
    assert np.isfinite(reverse).all()
    assert (np.asarray(reverse)[2:] == 0).all() and (np.asarray(reverse)[0, 5:] == 0).all()
    for token in (0, 3):
        nudge = np.zeros_like(logits)
        nudge[:2, token] = 0.01
        forward = jax.jvp(lambda z: solve(z, target), (logits,), (nudge,))[1]
        np.testing.assert_allclose(forward.sum(), (reverse * nudge).sum(), rtol=1e-4)
        for row in (0, 1):
            ends = [bisected(logits[row : row + 1] + s * nudge[row], float(target[row])) for s in (1, -1)]
            np.testing.assert_allclose(forward[row], (ends[0] - ends[1])[0] / 2, rtol=2e-3)


def test_logits_are_asked_for():
    with pytest.raises(ValueError, match=r"signal\.logits must be the logits"):
        Exact(1.0).update(quiet_signal(2), plain_action(jnp.ones(2)), ())


# The baselines.


def test_open_loops_stay_finite_at_the_ends():
    logits = np.zeros((3, VOCABULARY), np.float32)
    logits[0, 1:], logits[1, 0] = -np.inf, 300.0  # one token, and one-hot by underflow
    of = lambda law: act(law, seen(logits, jnp.ones(3)), plain_action(jnp.ones(3))).temperature
    np.testing.assert_allclose(of(EDT(theta=0.5)), [0.1, 0.1, 0.8 ** (0.5 / math.log(VOCABULARY))], rtol=1e-5)
    np.testing.assert_allclose(of(DynaTemp(0.2, 1.4, 0.5)), [0.2, 0.2, 1.4], rtol=1e-5)
    for law in (EDT(1.0, 0.5), DynaTemp(0.2, 1.4, 0.5)):
        gradient = jax.jit(jax.grad(lambda law: of(law).sum()))(law)
        assert np.isfinite(jax.tree.leaves(gradient)).all()


@pytest.mark.slow
@pytest.mark.parametrize("target", [2.5, 3.2])
def test_mirostat_truncates_and_holds_the_mean_surprisal(target):
    rows, steps = 32, 300
    logits = jnp.asarray(np.tile(-1.1 * np.log(np.arange(1, 501)), (rows, 1)), jnp.float32)
    normaliser = entropy.entropy_statistics(logits).log_normaliser
    law, sampling = Mirostat(target), parameters(rows)
    key, row = jax.random.key(0), jnp.arange(rows)

    def body(carry, position):
        action, surprisal = carry
        signal = quiet_signal(rows)._replace(surprisal=surprisal, emitting=jnp.ones(rows, bool))
        action = act(law, signal, action)
        place = key, row, jnp.full(rows, position)
        token = sample(logits, sampling, action.temperature, *place, action.surprisal_limit)
        surprisal = entropy.surprisal(logits, token, normaliser)
        return (action, surprisal), (action.surprisal_limit, surprisal)

    begin = plain_action(jnp.ones(rows)), jnp.zeros(rows)
    limits, surprisals = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(steps)))(begin)[1]
    np.testing.assert_allclose(limits[0], 2 * target)
    least = float(normaliser[0])  # of the most probable token, which is never cut off
    assert (np.asarray(surprisals) <= np.maximum(limits, least) + 1e-4).all()
    assert float(entropy.entropy_statistics(logits).entropy[0]) > target + 1, "it would not be so by itself"
    np.testing.assert_allclose(surprisals[100:].mean(), target, atol=0.05)
    np.testing.assert_allclose(surprisals[100:].mean(0), target, atol=0.2)


@pytest.mark.slow
def test_the_loop_holds_the_entropy_of_what_it_samples():
    texts = tiny.prompts(8, 12, 5)
    controller = chain(Exact(jnp.float32(2.0), highest_temperature=2.0), Mirostat(jnp.float32(1.5)))
    begun = tiny.begin(texts, controller=controller, temperature=[1.0, 0.0, 0.7])
    _, state, (trace,) = tiny.finish(begun, controller=controller)
    assert (trace.temperature[:20, 1] == 0).all() and state.action.surprisal_limit[1] == jnp.inf
    for row in (0, 2):
        temperature, reached = trace.temperature[:20, row], trace.tempered_entropy[:20, row]
        inside = (temperature > 0.1) & (temperature < 2.0)
        assert inside.sum() > 10 and np.ptp(temperature[inside]) > 0.05
        np.testing.assert_allclose(reached[inside], 2.0, atol=1e-3)
        assert (reached[temperature >= 2.0] <= 2.0).all() and (reached[temperature <= 0.1] >= 2.0).all()
        # μ is moved by every token but the last, which is still to be seen.
        moved = 3.0 - 0.1 * (trace.surprisal[:19, row] - 1.5).sum()
        np.testing.assert_allclose(state.action.surprisal_limit[row], moved, rtol=1e-4)
