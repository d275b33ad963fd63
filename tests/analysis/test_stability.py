"""The claims of the paper on stability, each on the side of its condition where it holds and on the other."""

import math
import re
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, entropy, models, parameters, start
from entropic_jax.analysis import stability
from entropic_jax.analysis.stability import Disturbed, HeldLogits
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control import chain, scheduling
from entropic_jax.control.pruning import LinearPruning, Pruning, limit_at_entropy
from entropic_jax.control.scheduling import PaperScheduling, Scheduling
from entropic_jax.control.temperature import Exact, Integral, Normalised, Paper
from entropic_jax.pallas.paged_attention import SelectionRules
from tests import tiny

pytestmark = pytest.mark.slow

EMBEDDED = Path(models.__file__).parent / "embedded"
VOCABULARY, ROWS, STEPS = 96, 4, 24
CLIPS: dict[str, Any] = dict(lowest_temperature=0.05, highest_temperature=20.0)
SOLUTION = np.float32([0.7, 1.0, 1.3, 0.9])  # the temperatures that meet the set-point, row by row
ONE_ROW = jnp.zeros((ROWS, STEPS), jnp.int32)


def synthetic() -> np.ndarray:
    """Logits of different slopes V_T, none near 0."""
    normal = np.random.default_rng(3).standard_normal((ROWS, VOCABULARY))
    return (np.array([[2.0], [2.5], [3.0], [4.0]]) * normal).astype(np.float32)


@once
def held() -> tuple[HeldLogits, Any, Any]:
    """A tiny model with held logits, and a state of four rows that have read a prompt."""
    m = tiny.model()
    decoder, params = HeldLogits(m.decoder), {"decoder": m.params, "logits": jnp.asarray(synthetic())}
    pool = allocate(m.decoder.shape, ROWS, 64, page_size=8)
    options = dict(key=jax.random.key(0), max_tokens=50, sample=parameters(ROWS, temperature=1.0))
    return decoder, params, start(decoder, params, chain(), pool, tiny.prompts(3, 3, 3, 3), **options)


def at(temperature: Any, logits: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and varentropy of the held logits at a temperature."""
    logits = jnp.asarray(synthetic() if logits is None else logits, jnp.float32)
    measured = entropy.at_temperature(logits, jnp.asarray(temperature, jnp.float32))
    return np.asarray(measured.entropy), np.asarray(measured.varentropy)


def sensitivity(law: Any, temperature: Any, logits: Any = None, width: float | None = None):
    decoder, params, state = held()
    params = params if logits is None else params | {"logits": jnp.asarray(logits, jnp.float32)}
    state = state._replace(action=state.action._replace(temperature=jnp.asarray(temperature, jnp.float32)))
    return stability.temperature_sensitivity(decoder, params, law, state, ONE_ROW, width)


def as_arrays(law: Any) -> Any:
    """The law with gains `[rows]`, so that other gains do not retrace."""
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (ROWS,)), law)


# Proposition 1: contraction of the temperature law.

TARGET, SLOPE = at(SOLUTION)


@pytest.mark.parametrize("share", [0.5, 1.5, 2.5])
def test_integral_contracts_by_one_minus_the_rate_times_the_varentropy(share):
    law = as_arrays(Integral(TARGET, share / SLOPE, **CLIPS))
    rates = stability.contraction_rates(sensitivity(law, SOLUTION))
    np.testing.assert_allclose(rates[:4], 1 - share, atol=0.02)
    numeric = stability.contraction_rates(sensitivity(law, SOLUTION, width=2e-3))
    np.testing.assert_allclose(numeric[:2], rates[:2], atol=0.05)
    # From a distance: it converges if and only if the rate is below 1 in absolute value.
    reached = np.asarray(sensitivity(law, 1.05 * SOLUTION).temperature)[-1]
    assert (np.abs(np.log(reached / SOLUTION)) < 0.01).all() == (share < 2)


def test_normalised_contracts_at_its_rate_where_the_slope_is_above_its_floor():
    steep, flat = SLOPE.min() / 2, 2 * SLOPE.max()  # V₀ below and above every slope
    for floor, expected in ((steep, np.full(ROWS, 0.7)), (flat, 1 - 0.3 * SLOPE / flat)):
        law = as_arrays(Normalised(TARGET, 0.3, lowest_varentropy=floor, **CLIPS))
        rates = stability.contraction_rates(sensitivity(law, SOLUTION))
        np.testing.assert_allclose(rates[:4], np.broadcast_to(expected, (4, ROWS)), atol=0.02)


def test_exact_forgets_the_temperature_before():
    forward = sensitivity(as_arrays(Exact(TARGET, **CLIPS)), SOLUTION)
    assert (stability.contraction_rates(forward) == 0).all()
    np.testing.assert_allclose(forward.temperature, np.broadcast_to(SOLUTION, (STEPS, ROWS)), rtol=2e-3)


def test_the_printed_sign_expands_and_ends_at_a_clip():
    law = as_arrays(Paper(TARGET, 0.2 / SLOPE, **CLIPS))
    np.testing.assert_allclose(stability.contraction_rates(sensitivity(law, SOLUTION))[:3], 1.2, atol=0.02)
    numeric = stability.contraction_rates(sensitivity(law, SOLUTION, width=2e-3))
    np.testing.assert_allclose(numeric[:2], 1.2, atol=0.05)
    near = as_arrays(Paper(TARGET, 2.0, lowest_temperature=0.5, highest_temperature=1.8))
    for factor, clip in ((1.02, 1.8), (0.98, 0.5)):
        reached = sensitivity(near, factor * SOLUTION).temperature[-1]
        np.testing.assert_allclose(reached, clip, rtol=1e-5)


def test_without_leverage_or_a_solution_between_the_clips_there_is_nothing_to_contract_to():
    law = as_arrays(Integral(TARGET, 0.5 / SLOPE, **CLIPS))
    certain = np.where(np.arange(VOCABULARY) == 5, 50.0, 0.0) * np.ones((ROWS, 1))
    assert at(SOLUTION, certain)[1].max() < 0.05
    rates = stability.contraction_rates(sensitivity(law, SOLUTION, certain))
    np.testing.assert_array_equal(rates, 1)  # the law makes no step
    low = as_arrays(Integral(TARGET, 0.5 / SLOPE, lowest_temperature=0.05, highest_temperature=0.6))
    clipped = sensitivity(low, np.full(ROWS, 0.55))
    np.testing.assert_allclose(clipped.temperature[-1], 0.6, rtol=1e-6)
    assert (TARGET - at(np.full(ROWS, 0.6))[0] > 0.05).all()


REAL = 48  # tokens


@once
def embedded() -> tuple[Any, Any, jax.Array]:
    """The embedded model, a state of two rows that have read prompts of code, and how the code continues."""
    model = models.load(EMBEDDED, "float32", progress=False)
    text = model.tokenizer.encode(Path(stability.__file__).read_text("utf-8"))
    texts = np.array([text[:160], text[400:560]], np.int32)
    pool = allocate(model.decoder.shape, 2, 512, page_size=16)
    begun = start(
        model.decoder, model.params, chain(), pool, texts[:, :-REAL].tolist(), key=jax.random.key(0),
        max_tokens=380, sample=parameters(2, temperature=1.0),
    )  # fmt: skip
    return model, begun, jnp.asarray(texts[:, -REAL:])


def test_on_a_real_text_the_steps_contract_by_the_same_factor():
    model, state, tokens = embedded()
    state = state._replace(action=state.action._replace(temperature=jnp.ones(2)))
    follow = partial(stability.temperature_sensitivity, model.decoder, model.params)
    wide = dict(lowest_temperature=1e-3, highest_temperature=1e4)
    gains = lambda rate: jax.tree.map(jnp.float32, dict(target_entropy=1.3, rate=rate, **wide))
    slowly = Integral(**gains(1e-3))  # T stays near 1, where the varentropy of every step is known
    forward = follow(slowly, state, tokens)
    _, trace = stability.loop.replay(model.decoder, model.params, slowly, state, tokens)
    steep = np.asarray(trace.tempered_varentropy)
    expected, clear = np.where(steep > 0.05, 1 - 1e-3 * steep, 1), np.abs(steep - 0.05) > 0.01
    np.testing.assert_allclose(stability.contraction_rates(forward)[clear], expected[clear], atol=3e-5)
    assert steep.max() > 4 > 1 > steep.min()
    for law, sign in ((Integral, -1), (Paper, 1)):
        forward = follow(law(**gains(0.02)), state, tokens).slope
        np.testing.assert_allclose(forward, follow(law(**gains(0.02)), state, tokens, 0.005).slope, rtol=0.1)
        assert (sign * np.log(forward[-1]) > 1).all(), "a distance in ln T shrinks, or grows"


# Appendix A: bounded noise of the estimate.

NOISES = {"constant": (1.0, 1.0), "opposite": (-1.0, -1.0), "alternating": (1.0, -1.0)}


def noise_gain(decoder: Any, params: Any, law: Any, state: Any, size: float) -> dict[str, np.ndarray]:
    """The largest error of H_T in the second half of a replay, per nat of noise on the measured entropy."""
    gains = {}
    for name, signs in NOISES.items():
        noisy = Disturbed(law, size * jnp.array(signs, jnp.float32))
        begun = state._replace(control=noisy.init(state.action))
        _, trace = stability.loop.replay(decoder, params, noisy, begun, ONE_ROW)
        late = np.asarray(trace.tempered_entropy)[STEPS // 2 :]
        gains[name] = np.abs(late - np.asarray(law.target_entropy)).max(0) / size
    return gains


@pytest.mark.parametrize("share", [0.3, 1.0, 1.5, 2.3])
def test_noise_is_not_amplified_up_to_a_rate_of_one_over_the_slope(share):
    decoder, params, state = held()
    state = state._replace(action=state.action._replace(temperature=jnp.asarray(SOLUTION)))
    law = as_arrays(Integral(TARGET, share / SLOPE, **CLIPS))
    gains = noise_gain(decoder, params, law, state, 0.01)
    worst = np.max([*gains.values()], axis=0)
    np.testing.assert_allclose(gains["constant"] if share < 2 else 1.0, 1.0, atol=0.05)
    if share <= 1:
        np.testing.assert_allclose(worst, 1.0, atol=0.05)
    elif share < 2:  # bounded still, but by more than the noise
        np.testing.assert_allclose(worst, share / (2 - share), rtol=0.1)
    else:
        assert (worst > 10).all()


def limits_of(law: Any, error: Any = None, replace: bool = False) -> np.ndarray:
    """ε along a replay of a real text without page policy, so that ε changes no logits, `[steps, rows]`."""
    m = tiny.model()
    _, _, state = held()
    law = law if error is None else Disturbed(law, jnp.asarray(error, jnp.float32), replace)
    tokens = jnp.asarray(tiny.prompts(*[STEPS] * ROWS, seed=1), jnp.int32)
    state = state._replace(control=law.init(state.action))
    return np.asarray(stability.loop.replay(m.decoder, m.params, law, state, tokens)[1].dropped_mass_limit)


def pruning(**gains: float) -> Pruning:
    plain = dict(dropped_mass_limit=0.4, low_entropy=0.5, high_entropy=4.5, rate=0.1)
    return Pruning(**jax.tree.map(jnp.float32, {**plain, **gains}), patience=jnp.int32(0))


def test_a_margin_of_the_noise_never_prunes_more_than_the_exact_entropy():
    noise = 0.5 * np.array([1, -1, -1, 1, -1, -1, -1, 0.3])
    exact = limits_of(pruning())
    assert exact.max() > 0.05 and np.ptp(exact[-8:]) > 0.01
    excess = {e: (limits_of(pruning(entropy_error=e), noise) - exact).max() for e in (0.0, 0.25, 0.5)}
    assert excess[0.5] <= 1e-6 < 0.01 < excess[0.25] < excess[0.0]


def test_the_entropy_floor_bounds_pruning_where_the_estimate_is_blind():
    blind = np.zeros(8)  # the estimator reports certainty at every token
    reached = lambda floor: limits_of(pruning(entropy_floor=floor, entropy_error=0.3), blind, True)[-1].max()
    assert reached(2.5) == pytest.approx(float(limit_at_entropy(jnp.float32(2.8), 0.5, 4.5, 0.4)))
    assert reached(4.2) == pytest.approx(0, abs=1e-6)  # H_min + ε_H at H_hi: nothing is pruned
    assert reached(0.2) == pytest.approx(0.4)  # H_min + ε_H below H_lo: the floor changes nothing


# The theorem of §7.4: an invariant set of temperature, pruning and schedule together; waiting times.

WIDTH, LONG, PAGE_SIZE = 2, 80, 4
LIMITS = stability.Limits(0.3, 1.5, 0.9, 0.1, 3 * PAGE_SIZE + 1, 10 + 3)
EXTREME = {
    "nan": [math.nan] * 8,
    "infinity": [math.inf] * 8,
    "minus infinity": [-math.inf] * 8,
    "ln V": [math.log(VOCABULARY)] * 8,
    "certain": [0.0] * 8,
    "alternating": [0.0, math.log(VOCABULARY)] * 4,
    "mixed": [0.0, math.nan, math.log(VOCABULARY), math.inf, 0.0, -math.inf, 30.0, -3.0],
}


def policy(min_pages: int) -> Selection:
    return Selection(dense_layers=0, rules=SelectionRules(sink_pages=1, recent_pages=1, min_pages=min_pages))


GUARDED = Integral(1.0, 0.5, lowest_temperature=0.3, highest_temperature=1.5), pruning(dropped_mass_limit=0.9)
FAIR = Scheduling(WIDTH, bound=1.0, ageing=0.1)
BARE = Integral(1.0, 0.5, lowest_temperature=0.01, highest_temperature=50.0), LinearPruning(0.95, 5.0)


@once
def crowded() -> tuple[HeldLogits, Any, Any]:
    """Six rows for two places and too few pages, with extreme logits; the last row has NaN."""
    m = tiny.model()
    token = np.arange(VOCABULARY)
    logits = np.stack(
        [*synthetic()[:3], 0.0 * token, np.where(token == 5, 0.0, -np.inf), np.where(token, 0.0, np.nan)]
    )
    decoder = HeldLogits(m.decoder)
    params = {"decoder": m.params, "logits": jnp.asarray(logits, jnp.float32)}
    pool = allocate(m.decoder.shape, 6, 128, page_size=PAGE_SIZE, pages=85)
    options = dict(key=jax.random.key(0), max_tokens=LONG, sample=parameters(6, temperature=1.0))
    return (
        decoder,
        params,
        start(decoder, params, chain(), pool, tiny.prompts(40, 41, 42, 43, 40, 44), **options),
    )


def coupled(laws: Any, error: Any, min_pages: int, load: Any = None) -> stability.Orbit:
    decoder, params, state = crowded()
    law = Disturbed(chain(*laws), jnp.asarray(error, jnp.float32), replace=True)
    control = law.init(state.action)
    control = control if load is None else scheduling.with_load(control, load)
    state = state._replace(control=control, page_policy=policy(min_pages))
    return jax.device_get(stability.record_orbit(decoder, params, law, state, LONG)[1])


@pytest.mark.parametrize("name", EXTREME)
def test_no_signal_drives_the_coupled_loop_out_of_its_invariant_set(name):
    assert stability.waiting_bound(FAIR, 6) == LIMITS.longest_wait
    orbit = coupled((*GUARDED, FAIR), EXTREME[name], 4)
    assert stability.violations(orbit, LIMITS) == dict.fromkeys(stability.violations(orbit, LIMITS), 0)
    emitted = orbit.trace.emitted
    assert not emitted[:, 5].any() and emitted[:, :5].any(0).all()  # the row of NaN logits has failed alone


def test_the_printed_law_has_the_same_invariant_set_since_the_clips_make_it():
    printed = Paper(1.0, 0.5, lowest_temperature=0.3, highest_temperature=1.5)
    orbit = coupled((printed, GUARDED[1], FAIR), EXTREME["alternating"], 4)
    assert sum(stability.violations(orbit, LIMITS).values()) == 0
    low, high = (np.isclose(orbit.action.temperature, clip).any() for clip in (0.3, 1.5))
    assert low or high, "and it is at a clip that it stays inside"


def test_without_its_guards_the_coupled_loop_leaves_every_bound():
    dear = scheduling.default_load(6)._replace(cost=jnp.array([1.0, 1.0, 0.1, 0.1, 1.0, 1.0]))
    orbit = coupled((*BARE, PaperScheduling(WIDTH)), EXTREME["alternating"], 0, dear)
    counts = stability.violations(orbit, LIMITS)
    assert min(counts.values()) > 0, counts


def test_priority_is_bounded_and_the_printed_one_is_not():
    drop = jnp.array([0.0, 1.0, 100.0, 1e30])  # finite: the predictor skips what is not
    for amount in (0.0, 1.0, jnp.inf, -9.0, jnp.nan):
        load = scheduling.default_load(4)._replace(cost=jnp.full(4, amount), slack=jnp.zeros(4))
        gains = dict(cost=0.5, memory=0.25, slack=0.25, ageing=0.1, bound=1.0)
        value = scheduling.priority(drop, load, jnp.arange(4), **gains)
        assert ((value >= 0) & (value <= 1.0 + 0.1 * np.arange(4) + 1e-6)).all()
    idle = scheduling.default_load(4)._replace(cost=jnp.zeros(4))
    assert scheduling.printed_priority(drop, idle, cost=0.5, memory=0.25, urgency=0.25)[1] > 1e5


def test_without_ageing_a_row_starves():
    dear = scheduling.default_load(6)._replace(cost=jnp.array([1.0, 1.0, 0.1, 0.1, 1.0, 1.0]))
    starving = Scheduling(WIDTH, bound=1.0, ageing=0.0)
    waits = [
        stability.violations(coupled((*GUARDED, law), EXTREME["alternating"], 4, dear), LIMITS)["wait"]
        for law in (starving, FAIR)
    ]
    assert waits[0] > 0 == waits[1]


def test_the_bound_on_waiting_counts_selections_and_a_row_without_pages_is_not_served():
    orbit = coupled((*GUARDED, FAIR), EXTREME["certain"], 4)
    selected = np.concatenate([np.ones((1, 6), bool), orbit.action.quota[:-1] > 0])
    stalled = selected & orbit.running & ~orbit.trace.emitted
    assert stalled[:, :5].any(0).sum() >= 2, "there are too few pages"
    waits = lambda served: stability.longest_run(orbit.running & ~served)[:5].max()
    assert waits(orbit.action.quota > 0) <= LIMITS.longest_wait < waits(orbit.trace.emitted)


# §4: fixed points and hysteresis.


@once
def fresh() -> Any:
    texts = tiny.prompts(*[12] * ROWS, seed=2)
    return tiny.begin(texts, context=256, max_tokens=240, temperature=1.0)


def hysteresis_of(levels: list[Any], field: str, steps: int = 20) -> stability.Gap:
    m, state = tiny.model(), fresh()
    state = state._replace(control=levels[0].init(state.action))
    measured = stability.measure_hysteresis(m.decoder, m.params, levels, state, steps)
    return stability.branch_gap(measured, field)


SET_POINTS = (0.1, 2.0, 4.55)  # nats; no temperature between the clips meets the first and the last


def test_the_printed_law_latches_and_the_corrected_one_has_a_single_branch():
    gains = dict(rate=0.3, lowest_temperature=0.5, highest_temperature=1.5)
    levels = lambda law: [jax.tree.map(jnp.float32, law(h, **gains)) for h in SET_POINTS]
    printed = hysteresis_of(levels(Paper), "tempered_entropy")
    assert printed.direction.high < -0.3 and abs(printed.noise.mean) < 0.3
    corrected = hysteresis_of(levels(Integral), "tempered_entropy")
    assert corrected.direction.low < 0 < corrected.direction.high
    assert abs(corrected.hysteresis.mean) < 0.2


def test_a_dead_band_of_the_budget_is_seen_as_hysteresis():
    levels = lambda dead: [
        pruning(dropped_mass_limit=e, rate=1.0, hysteresis=dead, low_entropy=9.0, high_entropy=9.5)
        for e in np.linspace(0.1, 0.5, 5)
    ]
    with_band = hysteresis_of(levels(0.15), "dropped_mass_limit")
    without = hysteresis_of(levels(0.0), "dropped_mass_limit")
    assert with_band.direction.low > 0.01
    assert without.hysteresis.mean == pytest.approx(0, abs=1e-6)


def test_hysteresis_in_the_text_of_a_trained_model():
    model, state, _ = embedded()
    gains = dict(rate=0.3, lowest_temperature=0.3, highest_temperature=1.5)
    measured = {}
    for law in (Paper, Integral):
        levels = [jax.tree.map(jnp.float32, law(h, **gains)) for h in (0.01, 1.5, 8.0)]
        begun = state._replace(control=levels[0].init(state.action))
        measured[law] = stability.measure_hysteresis(model.decoder, model.params, levels, begun, 40)
    middle = lambda law, branch: getattr(measured[law], branch)["tempered_entropy"][1]
    assert (middle(Paper, "up") > middle(Paper, "down") + 1).all()
    assert (np.abs(middle(Integral, "up") - middle(Integral, "down")) < 1).all()


# The page.

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stability.md"
CLAIMS = [row.split(" | ") for row in PAGE.read_text("utf-8").splitlines() if row.count(" | ") == 3]


def test_every_claim_has_a_verdict_and_a_test_that_exists():
    claims = [row for row in CLAIMS if row[1] in ("verified", "corrected", "refuted")]
    assert len(claims) > 12 and {row[1] for row in claims} == {"verified", "corrected", "refuted"}
    for claim, _, _, tests in claims:
        files = [
            Path(__file__),
            *(PAGE.parents[1] / name for name in re.findall(r"`(tests/\S+\.py)`", tests)),
        ]
        text = "".join(file.read_text("utf-8") for file in files)
        names = re.findall(r"`(test_\w+)`", tests)
        assert names and all(f"def {name}(" in text for name in names), claim
