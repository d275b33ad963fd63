"""Micro control: how much randomness the next token gets, row by row.

Let H_T and V_T be the entropy and the varentropy of softmax(z / T), in nats and nats². As dH_T / d ln T = V_T
is never negative, to hold H_T at a set-point H* a law must cool where the entropy is above it. `Integral`,
`Normalised` and `Exact` do; `Paper` is the law as printed, which heats. `Mirostat`, `EDT` and `DynaTemp` are
what they must be compared with: the first holds the surprisal by truncation, the others set no point at all.

Common to all: gains are numbers or arrays `[rows]`. A row at temperature 0 is greedy and is left alone, and
no other row is ever set to 0. A row whose measures are not finite keeps what it obeys. Gradients with
respect to gains are finite. No law needs a state of its own: what it integrates is the action in force.

Source: Kiruluta 2026, Entropic-Time Inference, arXiv 2603.03310; other sources are stated with each law.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..entropy import LOWEST_TEMPERATURE, at_temperature, measure
from ..state import Action, Signal
from .controller import pytree

Gain = float | jax.Array

LEVERAGE = 0.05  # nats²; where V_T is less, temperature moves too little for the error to be its fault
ITERATIONS = 10  # of `matching_temperature`, at most
TOLERANCE = 1e-4  # nats; an iterate this close is improved once more and taken
SMALLEST = 1e-6  # nats and nats²; float32 tells no smaller entropy from 0


class _Memoryless:
    def init(self, action: Action) -> tuple[()]:
        return ()


def _finite(measured: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(measured), measured, 0.0)


def _logits(signal: Signal) -> jax.Array:
    if signal.logits is None:
        raise ValueError("signal.logits is None; accepted are the logits of the step, [rows, vocabulary]")
    return signal.logits


def _plain_entropy(signal: Signal) -> tuple[jax.Array, jax.Array]:
    """The entropy of softmax(z), 1 where it is no number, and whether it is one."""
    entropy = measure(_logits(signal)).entropy
    sound = jnp.isfinite(entropy)
    return jnp.where(sound, entropy, 1.0), sound


def _greatest_entropy(logits: jax.Array) -> jax.Array:
    return jnp.log(jnp.maximum(jnp.sum(logits > -jnp.inf, axis=-1), 1).astype(jnp.float32))


def _set_temperature(
    action: Action, temperature: jax.Array, lowest_temperature: Gain, highest_temperature: Gain
) -> Action:
    """The action at `temperature` within the clips, but for greedy rows and for what is no number."""
    usable = (action.temperature > 0) & jnp.isfinite(temperature)
    bounded = jnp.clip(jnp.where(usable, temperature, 1.0), lowest_temperature, highest_temperature)
    # A clip at 0 would turn the row greedy, from which no law brings it back.
    bounded = jnp.maximum(bounded, LOWEST_TEMPERATURE)
    return action._replace(temperature=jnp.where(usable, bounded, action.temperature))


def _factor(signal: Signal, action: Action, step: jax.Array) -> jax.Array:
    """What T is multiplied by for a step of ln T, which is withheld where temperature has no leverage.

    The exception leads back from where the law has gone itself: so cold (or hot) that V_T vanishes for logits
    which temperature does move at T = 1. Without it such a row would be locked for good.
    """
    here = _finite(signal.tempered_varentropy) >= LEVERAGE
    back = jnp.where(action.temperature < 1, step > 0, step < 0)
    elsewhere = _finite(signal.varentropy) >= LEVERAGE
    return jnp.exp(jnp.where(here | (back & elsewhere), step, 0.0))


@pytree
class Paper(_Memoryless):
    """The law of the paper as printed: positive feedback, kept by name for comparison.

        T ← clip(T · exp(+η (H_T − H*)), T_min, T_max)

    Around a solution, ln T − ln T* is multiplied by 1 + η V_T at each step: the law leaves the set-point,
    runs into a clip and stays there, which is how it lowers the variance of the entropy. target_entropy H* in
    nats, rate η per nat, lowest_temperature T_min and highest_temperature T_max > 0. Differentiable inside
    the clips. Source: arXiv 2603.03310, the update of temperature. `Integral` has the sign that its theorem
    needs.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(tempered_entropy=jnp.array([3.0]))
    >>> action, _ = Paper(target=1.0, rate=0.1).update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    1.2214
    """

    target_entropy: Gain
    rate: Gain = 0.02
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 2.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        factor = jnp.exp(self.rate * _finite(signal.tempered_entropy - self.target_entropy))
        return _set_temperature(
            action, action.temperature * factor, self.lowest_temperature, self.highest_temperature
        ), state


@pytree
class Integral(_Memoryless):
    """Integral control of ln T, the paper's law with the sign that makes it one.

        ln T ← clip(ln T − η (H_T − H*), ln T_min, ln T_max)

    Around a solution, ln T − ln T* is multiplied by 1 − η V_T: monotone for η ≤ 1 / V_max, and V_max is about
    (ln V)² / 4 + 1 for a vocabulary of V, 35.6 at 128k. target_entropy H* in nats, rate η per nat,
    lowest_temperature T_min and highest_temperature T_max > 0. T itself is what is integrated, so nothing
    winds up beyond a clip; nor is a step taken where V_T < 0.05 nats², unless it leads back towards T = 1 and
    V₁ is not as small. Differentiable inside the clips. Source: arXiv 2603.03310, the update of temperature.
    Differs from the paper: the sign; no windup.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(
    ...     tempered_entropy=jnp.array([3.0]), tempered_varentropy=jnp.array([2.0])
    ... )
    >>> action, _ = Integral(target=1.0, rate=0.1).update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    0.8187
    """

    target_entropy: Gain
    rate: Gain = 0.02
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 2.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        step = -self.rate * _finite(signal.tempered_entropy - self.target_entropy)
        factor = _factor(signal, action, step)
        return _set_temperature(
            action, action.temperature * factor, self.lowest_temperature, self.highest_temperature
        ), state


@pytree
class Normalised(_Memoryless):
    """Integral control of ln T with its gain divided by the slope.

        ln T ← clip(ln T − ρ (H_T − H*) / max(V_T, V₀), ln T_min, ln T_max),  |Δ ln T| ≤ Δ

    As V_T is the slope, an error shrinks by the factor 1 − ρ in each step, whatever the distribution; V₀
    keeps the gain finite where it is flat. target_entropy H* in nats, rate ρ in (0, 1], least V₀ in nats² >
    0, most Δ > 0, lowest_temperature T_min and highest_temperature T_max > 0. Where a step is withheld, and
    differentiable, as `Integral`. Source: arXiv 2603.03310, the update of temperature. Differs from the
    paper: the sign, the gain schedule.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(
    ...     tempered_entropy=jnp.array([3.0]), tempered_varentropy=jnp.array([4.0])
    ... )
    >>> action, _ = Normalised(target=1.0).update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    0.8607
    """

    target_entropy: Gain
    rate: Gain = 0.3
    least: Gain = 1.0
    most: Gain = 0.2
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 2.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        slope = jnp.maximum(_finite(signal.tempered_varentropy), self.least)
        step = -self.rate * _finite(signal.tempered_entropy - self.target_entropy) / slope
        factor = _factor(signal, action, jnp.clip(step, -jnp.asarray(self.most), self.most))
        return _set_temperature(
            action, action.temperature * factor, self.lowest_temperature, self.highest_temperature
        ), state


@jax.custom_jvp
def matching_temperature(
    logits: jax.Array,
    target_entropy: jax.Array,
    start: jax.Array,
    lowest_temperature: jax.Array,
    highest_temperature: jax.Array,
) -> jax.Array:
    """The temperature T in [lowest, highest] at which softmax(z / T) has the entropy `target_entropy`.

        H_T = H*,  by Newton on ln T, with slope V_T, of ln H − ln(ln k − H), k tokens being unmasked

    logits float32 `[rows, vocabulary]`; the others float32 `[rows]`: target in nats, the temperature to start
    from, and the clips > 0. Where even a clip does not reach the target, the clip; where start is 0, 0; where
    the logits hold NaN, something finite. In these coordinates the curve is nearly straight at both ends,
    and a step which leaves the bracket is replaced by its middle, or by the clip if that has not been tried:
    at most ten passes over the logits, and no more than the slowest row needs. Rows do not affect each other.

    Differentiable by the implicit function theorem, in forward and reverse mode, without going through the
    iteration: dT / dH* = T / V_T; at a clip the derivative is that of the clip.

    >>> rows = lambda x: jnp.full(1, x)
    >>> logits = jnp.log(jnp.array([[0.7, 0.2, 0.1]]))
    >>> found = matching_temperature(logits, rows(1.0), rows(1.0), rows(0.1), rows(9.0))
    >>> round(float(at_temperature(logits, found).entropy[0]), 4)
    1.0
    """
    greatest = _greatest_entropy(logits)
    room = lambda entropy: jnp.maximum(greatest - entropy, SMALLEST)
    straight = lambda entropy: jnp.log(jnp.maximum(entropy, SMALLEST)) - jnp.log(room(entropy))
    warm = start > 0
    bottom, top = jnp.log(lowest_temperature), jnp.log(highest_temperature)

    def refine(carry):
        count, point, left, right, untried, settled = carry
        now = at_temperature(logits, jnp.exp(point))
        above = now.entropy > target_entropy
        slope = now.varentropy * (1 / jnp.maximum(now.entropy, SMALLEST) + 1 / room(now.entropy))
        newton = point - (straight(now.entropy) - straight(target_entropy)) / jnp.maximum(slope, SMALLEST)
        left, right = jnp.where(above, left, point), jnp.where(above, point, right)
        untried = untried[0] & above, untried[1] & ~above  # the bracket still ends at a clip not looked at
        middle = (left + right) / 2
        guarded = jnp.where(newton < left, jnp.where(untried[0], left, middle), newton)
        guarded = jnp.where(newton > right, jnp.where(untried[1], right, middle), guarded)
        close = jnp.abs(now.entropy - target_entropy) < TOLERANCE
        # Where the curve is all but flat, a step from close by may lead far away.
        astray = (close & (jnp.abs(guarded - point) > 0.01)) | ~jnp.isfinite(now.entropy)
        guarded = jnp.where(astray, point, guarded)
        arrived = close | (guarded == point)
        point = jnp.where(settled, point, guarded)
        return count + 1, point, left, right, untried, settled | arrived

    begin = jnp.clip(jnp.log(jnp.where(warm, start, 1.0)), bottom, top)
    everywhere = jnp.ones(start.shape, bool)
    carry = (jnp.int32(0), begin, bottom, top, (everywhere, everywhere), ~warm)
    _, point, *_ = lax.while_loop(lambda c: (c[0] < ITERATIONS) & ~c[-1].all(), refine, carry)
    found = jnp.where(
        point <= bottom, lowest_temperature, jnp.where(point >= top, highest_temperature, jnp.exp(point))
    )
    return jnp.where(warm, found, 0.0)


@matching_temperature.defjvp
def _implicit(primals, tangents):
    logits, _, start, lowest_temperature, highest_temperature = primals
    d_logits, d_target, _, d_lowest, d_highest = tangents
    found = matching_temperature(*primals)
    now, change = jax.jvp(lambda z: at_temperature(z, found), (logits,), (d_logits,))
    inside = found * (d_target - change.entropy) / jnp.maximum(now.varentropy, SMALLEST)
    moved = jnp.where(
        found <= lowest_temperature, d_lowest, jnp.where(found >= highest_temperature, d_highest, inside)
    )
    return found, jnp.where(start > 0, moved, 0.0)


@pytree
class Exact(_Memoryless):
    """The set-point met at every step: H_T = H* is solved for the logits about to be sampled.

        T ← clip(T : H(softmax(z / T)) = H*, T_min, T_max)

    target_entropy H* in nats, lowest_temperature T_min and highest_temperature T_max > 0. Reached to 1e-3
    nats wherever H(T_min) ≤ H* ≤ H(T_max); elsewhere T is the nearer clip, as H rises with T. Nothing is
    integrated, so nothing winds up. Differentiable by the implicit function theorem, see
    `matching_temperature`. Differs from the paper (arXiv 2603.03310): no feedback, hence no delay, and no
    gain to tune.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(logits=jnp.array([[3.0, 1.0, 0.0]]))
    >>> action, _ = Exact(target=0.5).update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(at_temperature(signal.logits, action.temperature).entropy[0]), 4)
    0.5
    """

    target_entropy: Gain
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 2.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        by_row = lambda gain: jnp.broadcast_to(jnp.asarray(gain, jnp.float32), action.temperature.shape)
        logits, target_entropy = _logits(signal), by_row(self.target_entropy)
        clips = by_row(self.lowest_temperature), by_row(self.highest_temperature)
        sound = jnp.isfinite(jnp.max(logits, axis=-1)) & jnp.isfinite(target_entropy)
        safe = jnp.where(sound[:, None], logits, 0.0), jnp.where(sound, target_entropy, 0.0)
        found = matching_temperature(*safe, action.temperature, *clips)
        return _set_temperature(action, jnp.where(sound, found, jnp.nan), *clips), state


@pytree
class Mirostat(_Memoryless):
    """Mirostat 2: hold the surprisal of the tokens by cutting off those that are too surprising.

        μ ← μ − η (S − τ), μ = 2 τ at first;  tokens with −ln softmax(z / T) > μ are cut off

    S is the surprisal of the token emitted last, under the belief; μ is the action's `surprisal_limit`, which
    is infinite before the first step. target τ in nats, rate η without unit. Temperature stays the request's.
    As published, μ is not bounded: where τ is out of reach it winds up. Differentiable.
    Source: Basu et al. 2021, arXiv 2007.14966. Differs from the paper: nats in place of bits (its τ = 3 bits
    is 2.08 nats here; η is the same). S is taken before penalties and temperature.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> law, action = Mirostat(target=2.0), plain_action(jnp.array([1.0]))
    >>> signal = quiet_signal(1)._replace(surprisal=jnp.array([5.0]))
    >>> action, _ = law.update(signal, action, ())
    >>> float(action.surprisal_limit[0])
    4.0
    >>> action, _ = law.update(signal, action, ())
    >>> round(float(action.surprisal_limit[0]), 4)
    3.7
    """

    target_entropy: Gain
    rate: Gain = 0.1

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        fresh = jnp.isinf(action.surprisal_limit)
        held = jnp.where(fresh, 0.0, action.surprisal_limit)
        moved = held - self.rate * _finite(signal.surprisal - self.target_entropy)
        limit = jnp.where(fresh, 2 * jnp.asarray(self.target_entropy, jnp.float32), moved)
        usable = (action.temperature > 0) & jnp.isfinite(limit)
        return action._replace(surprisal_limit=jnp.where(usable, limit, action.surprisal_limit)), state


@pytree
class EDT(_Memoryless):
    """Entropy-based dynamic temperature: cooler where the model is certain.

        T = max(T₀ · 0.8^(θ / H₁), T_min),  H₁ the entropy of softmax(z)

    base T₀ > 0 is reached at high entropy; theta θ ≥ 0 in nats says how soon; lowest_temperature T_min > 0.
    An open loop: no set-point, no memory. Differentiable above T_min. Source: Zhang et al. 2024, arXiv
    2403.14541, which tunes T₀ and θ by task. Differs from the paper: T_min, as T would vanish with H₁ and 0
    is greedy.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(logits=jnp.zeros((1, 8)))
    >>> action, _ = EDT(theta=1.0).update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    0.8982
    """

    base: Gain = 1.0
    theta: Gain = 1.0
    lowest_temperature: Gain = 0.1

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        entropy, sound = _plain_entropy(signal)
        temperature = self.base * jnp.exp(jnp.log(0.8) * self.theta / jnp.maximum(entropy, SMALLEST))
        return _set_temperature(
            action, jnp.where(sound, temperature, jnp.nan), self.lowest_temperature, jnp.inf
        ), state


@pytree
class DynaTemp(_Memoryless):
    """Dynamic temperature: between two temperatures, by the share of the greatest possible entropy.

        T = T_lo + (T_hi − T_lo) · (H₁ / ln k)^e,  H₁ the entropy of softmax(z), k its unmasked tokens

    lowest_temperature T_lo and highest_temperature T_hi > 0, exponent e > 0. Where k is 1, T_lo: it makes no
    difference. An open loop, as `EDT`. Differentiable. Source: llama.cpp and KoboldCpp, option dynatemp.
    Differs from them: H₁ and k are taken before truncation, which comes after the temperature here.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(logits=jnp.zeros((1, 8)))
    >>> action, _ = DynaTemp(lowest=0.5, highest=1.5).update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    1.5
    """

    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 2.0
    exponent: Gain = 1.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        entropy, sound = _plain_entropy(signal)
        some = sound & (entropy > 0)  # a power of 0 has no finite derivative
        share = jnp.where(some, entropy, 1.0) / jnp.where(some, _greatest_entropy(_logits(signal)), 1.0)
        power = jnp.where(some, jnp.exp(self.exponent * jnp.log(share)), 0.0)
        temperature = self.lowest_temperature + (self.highest_temperature - self.lowest_temperature) * power
        return _set_temperature(
            action, jnp.where(sound, temperature, jnp.nan), self.lowest_temperature, self.highest_temperature
        ), state


LAWS: dict[str, type] = {
    "paper": Paper,
    "integral": Integral,
    "normalised": Normalised,
    "exact": Exact,
    "mirostat": Mirostat,
    "edt": EDT,
    "dynatemp": DynaTemp,
}
