"""Temperature laws, the micro scale: how much randomness the next token gets, row by row.

Let H_T and V_T be the entropy (nats) and the varentropy (nats²) of softmax(z / T). Since dH_T / d ln T = V_T
is never negative, a law that holds H_T at a set-point H* must cool when the entropy is above it. `Integral`,
`Normalised` and `Exact` do; `Paper` is the law as printed, which heats. `Mirostat`, `EDT` and `DynaTemp` are
baselines: the first holds the surprisal by truncation, the other two have no set-point.

`Integral`, `Normalised` and `Exact` never exceed the requested temperature unless `highest_temperature` is
set: where it is 0, `update_rows` replaces it by the requested temperature before a law runs. In all laws,
gains are numbers or arrays `[rows]`. A row at temperature 0 is greedy and stays unchanged; no other row is
ever set to 0. A row whose measurements are not finite keeps its action. Gradients with respect to gains are
finite. The laws are stateless: the integrated quantity is the action in force.

Source: Kiruluta 2026, Entropic-Time Inference, arXiv 2603.03310; other sources are stated with each law.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..entropy import entropy_statistics
from ..state import Action, Signal
from ..state.pytree import Gain, pytree
from .temperature_bounds import finite_or_zero, set_temperature
from .temperature_solver import max_entropy, solve_temperature

SMALLEST_VARENTROPY = 0.05  # nats²; below it, changing the temperature hardly changes the entropy
SMALLEST = 1e-6  # nats and nats²; in float32 no smaller entropy differs from 0


class _Stateless:
    def init(self, action: Action) -> tuple[()]:
        """See `Controller`: no state."""
        return ()


def _logits(signal: Signal) -> jax.Array:
    if signal.logits is None:
        raise ValueError("signal.logits must be the logits of the step, [rows, vocabulary]; got None")
    return signal.logits


def _plain_entropy(signal: Signal) -> tuple[jax.Array, jax.Array]:
    """The entropy of softmax(z), 1 where it is not finite, and whether it is finite."""
    entropy = entropy_statistics(_logits(signal)).entropy
    finite = jnp.isfinite(entropy)
    return jnp.where(finite, entropy, 1.0), finite


def _factor(signal: Signal, action: Action, step: jax.Array) -> jax.Array:
    """exp(step), the factor of T for a step of ln T; 1 where temperature hardly changes the entropy.

    Exception: a step back towards T = 1 is made if V₁ is large enough. Otherwise a row whose V_T vanished
    because the law itself went too cold (or too hot) would stay there forever.
    """
    responsive = finite_or_zero(signal.tempered_varentropy) >= SMALLEST_VARENTROPY
    towards_one = jnp.where(action.temperature < 1, step > 0, step < 0)
    responsive_at_one = finite_or_zero(signal.varentropy) >= SMALLEST_VARENTROPY
    return jnp.exp(jnp.where(responsive | (towards_one & responsive_at_one), step, 0.0))


@pytree
class Paper(_Stateless):
    """The law of the paper as printed: positive feedback, kept for comparison.

        T ← clip(T · exp(+η (H_T − H*)), T_min, T_max)

    Around a solution, ln T − ln T* is multiplied by 1 + η V_T at each step. The law leaves the set-point and
    stays at a clip, which is how it lowers the variance of the entropy. Differentiable inside the clips.

    Args:
        target_entropy: H*, nats.
        rate: η > 0, per nat.
        lowest_temperature: T_min > 0.
        highest_temperature: T_max; 0 is the requested temperature, and the law cannot heat.

    Source: arXiv 2603.03310, the temperature update. `Integral` has the sign that its theorem needs.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(tempered_entropy=jnp.array([3.0]))
    >>> action, _ = Paper(target_entropy=1.0, rate=0.1).update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    1.2214
    """

    target_entropy: Gain
    rate: Gain = 0.02
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 2.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`: writes `temperature`."""
        factor = jnp.exp(self.rate * finite_or_zero(signal.tempered_entropy - self.target_entropy))
        temperature = action.temperature * factor
        bounds = self.lowest_temperature, self.highest_temperature
        return set_temperature(action, temperature, *bounds), state


@pytree
class Integral(_Stateless):
    """Integral control of ln T: the paper's law with the sign that stabilises it.

        ln T ← clip(ln T − η (H_T − H*), ln T_min, ln T_max)

    Around a solution, ln T − ln T* is multiplied by 1 − η V_T: monotone for η ≤ 1 / V_max, where V_max is
    about (ln V)² / 4 + 1 for a vocabulary of V, 35.6 at 128k. The integrated quantity is T itself, so nothing
    winds up at a clip. No step is made where V_T < 0.05 nats², unless it leads back towards T = 1 and V₁ is
    larger. Differentiable inside the clips.

    Args:
        target_entropy: H*, nats.
        rate: η > 0, per nat.
        lowest_temperature: T_min > 0.
        highest_temperature: T_max; 0 is the requested temperature.

    Source: arXiv 2603.03310, the temperature update. Differs from the paper: the sign; no windup.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(
    ...     tempered_entropy=jnp.array([3.0]), tempered_varentropy=jnp.array([2.0])
    ... )
    >>> law = Integral(target_entropy=1.0, rate=0.1, highest_temperature=2.0)
    >>> action, _ = law.update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    0.8187
    """

    target_entropy: Gain
    rate: Gain = 0.02
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 0.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`: writes `temperature`."""
        step = -self.rate * finite_or_zero(signal.tempered_entropy - self.target_entropy)
        factor = _factor(signal, action, step)
        temperature = action.temperature * factor
        bounds = self.lowest_temperature, self.highest_temperature
        return set_temperature(action, temperature, *bounds), state


@pytree
class Normalised(_Stateless):
    """Integral control of ln T with the gain divided by the slope (gain scheduling).

        ln T ← clip(ln T − ρ (H_T − H*) / max(V_T, V₀), ln T_min, ln T_max),  |Δ ln T| ≤ Δ

    V_T is the slope, so an error shrinks by the factor 1 − ρ in each step, whatever the distribution. Steps
    are withheld as in `Integral`. Differentiable inside the clips.

    Args:
        target_entropy: H*, nats.
        rate: ρ, in (0, 1], without unit.
        lowest_varentropy: V₀ > 0, nats²; it keeps the gain finite where the slope vanishes.
        largest_step: Δ > 0, the largest change of ln T in a step.
        lowest_temperature: T_min > 0.
        highest_temperature: T_max; 0 is the requested temperature.

    Source: arXiv 2603.03310, the temperature update. Differs from the paper: the sign, the gain schedule.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(
    ...     tempered_entropy=jnp.array([3.0]), tempered_varentropy=jnp.array([4.0])
    ... )
    >>> law = Normalised(target_entropy=1.0, highest_temperature=2.0)
    >>> action, _ = law.update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    0.8607
    """

    target_entropy: Gain
    rate: Gain = 0.3
    lowest_varentropy: Gain = 1.0
    largest_step: Gain = 0.2
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 0.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`: writes `temperature`."""
        slope = jnp.maximum(finite_or_zero(signal.tempered_varentropy), self.lowest_varentropy)
        step = -self.rate * finite_or_zero(signal.tempered_entropy - self.target_entropy) / slope
        factor = _factor(signal, action, jnp.clip(step, -jnp.asarray(self.largest_step), self.largest_step))
        temperature = action.temperature * factor
        bounds = self.lowest_temperature, self.highest_temperature
        return set_temperature(action, temperature, *bounds), state


@pytree
class Exact(_Stateless):
    """Meets the set-point at every step: H_T = H* is solved for the logits about to be sampled.

        T ← clip(T : H(softmax(z / T)) = H*, T_min, T_max)

    Accurate to 1e-3 nats where H(T_min) ≤ H* ≤ H(T_max); elsewhere T is the nearer clip. Nothing is
    integrated, so nothing winds up. Differentiable by the implicit function theorem, see `solve_temperature`.

    Args:
        target_entropy: H*, nats.
        lowest_temperature: T_min > 0.
        highest_temperature: T_max; 0 is the requested temperature.

    Differs from the paper (arXiv 2603.03310): no feedback, hence no delay, and no gain to tune.

    >>> from entropic_jax.entropy import at_temperature
    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(logits=jnp.array([[3.0, 1.0, 0.0]]))
    >>> law = Exact(target_entropy=0.5, highest_temperature=2.0)
    >>> action, _ = law.update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(at_temperature(signal.logits, action.temperature).entropy[0]), 4)
    0.5
    """

    target_entropy: Gain
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 0.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`: writes `temperature`."""

        def by_row(gain: Gain) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(gain, jnp.float32), action.temperature.shape)

        logits, target_entropy = _logits(signal), by_row(self.target_entropy)
        highest = by_row(self.highest_temperature)
        clips = jnp.minimum(by_row(self.lowest_temperature), highest), highest
        finite = jnp.isfinite(jnp.max(logits, axis=-1)) & jnp.isfinite(target_entropy)
        safe = jnp.where(finite[:, None], logits, 0.0), jnp.where(finite, target_entropy, 0.0)
        temperature = solve_temperature(*safe, action.temperature, *clips)
        return set_temperature(action, jnp.where(finite, temperature, jnp.nan), *clips), state


@pytree
class Mirostat(_Stateless):
    """Mirostat 2: holds the surprisal of the tokens by truncating the most surprising ones.

        μ ← μ − η (S − τ), initially μ = 2 τ;  tokens with −ln softmax(z / T) > μ are cut off

    S is the surprisal of the last token under the belief; μ is the action's `surprisal_limit`, infinite
    before the first step. The temperature stays the request's. As published, μ is unbounded: it winds up when
    τ is out of reach. Differentiable.

    Args:
        target_entropy: τ, the target surprisal, nats.
        rate: η > 0, without unit.

    Source: Basu et al. 2021, arXiv 2007.14966. Differs from the paper: nats instead of bits (its τ = 3 bits
    is 2.08 nats here; η is the same); S is taken before penalties and temperature.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> law, action = Mirostat(target_entropy=2.0), plain_action(jnp.array([1.0]))
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
        """See `Controller`: writes `surprisal_limit`."""
        first = jnp.isinf(action.surprisal_limit)
        previous = jnp.where(first, 0.0, action.surprisal_limit)
        moved = previous - self.rate * finite_or_zero(signal.surprisal - self.target_entropy)
        limit = jnp.where(first, 2 * jnp.asarray(self.target_entropy, jnp.float32), moved)
        usable = (action.temperature > 0) & jnp.isfinite(limit)
        return action._replace(surprisal_limit=jnp.where(usable, limit, action.surprisal_limit)), state


@pytree
class EDT(_Stateless):
    """Entropy-based dynamic temperature (EDT): cooler where the model is certain.

        T = max(T₀ · 0.8^(θ / H₁), T_min),  H₁ the entropy of softmax(z)

    Open loop: no set-point, no memory. Differentiable above T_min.

    Args:
        base: T₀ > 0, the temperature at high entropy.
        theta: θ ≥ 0, nats; the larger, the higher the entropy at which T approaches T₀.
        lowest_temperature: T_min > 0.

    Source: Zhang et al. 2024, arXiv 2403.14541, which tunes T₀ and θ by task. Differs from the paper: T_min
    is added, since T would vanish with H₁ and 0 is greedy.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(logits=jnp.zeros((1, 8)))
    >>> action, _ = EDT(theta=1.0).update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    0.8982
    """

    fixed_gains: ClassVar[bool] = True
    base: Gain = 1.0
    theta: Gain = 1.0
    lowest_temperature: Gain = 0.1

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`: writes `temperature`."""
        entropy, finite = _plain_entropy(signal)
        temperature = self.base * jnp.exp(jnp.log(0.8) * self.theta / jnp.maximum(entropy, SMALLEST))
        return set_temperature(
            action, jnp.where(finite, temperature, jnp.nan), self.lowest_temperature, jnp.inf
        ), state


@pytree
class DynaTemp(_Stateless):
    """Dynamic temperature: interpolates between two temperatures by the relative entropy.

        T = T_lo + (T_hi − T_lo) · (H₁ / ln k)^e,  H₁ the entropy of softmax(z), k its unmasked tokens

    Where k is 1, T is T_lo. Open loop, as `EDT`. Differentiable.

    Args:
        lowest_temperature: T_lo > 0.
        highest_temperature: T_hi > 0.
        exponent: e > 0.

    Source: llama.cpp and KoboldCpp, option dynatemp. Differs from them: H₁ and k are taken before truncation,
    which follows the temperature here.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> signal = quiet_signal(1)._replace(logits=jnp.zeros((1, 8)))
    >>> law = DynaTemp(lowest_temperature=0.5, highest_temperature=1.5)
    >>> action, _ = law.update(signal, plain_action(jnp.array([1.0])), ())
    >>> round(float(action.temperature[0]), 4)
    1.5
    """

    fixed_gains: ClassVar[bool] = True
    lowest_temperature: Gain = 0.1
    highest_temperature: Gain = 2.0
    exponent: Gain = 1.0

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`: writes `temperature`."""
        entropy, finite = _plain_entropy(signal)
        positive = finite & (entropy > 0)  # a power of 0 has no finite derivative
        ratio = jnp.where(positive, entropy, 1.0) / jnp.where(positive, max_entropy(_logits(signal)), 1.0)
        power = jnp.where(positive, jnp.exp(self.exponent * jnp.log(ratio)), 0.0)
        temperature = self.lowest_temperature + (self.highest_temperature - self.lowest_temperature) * power
        return set_temperature(
            action, jnp.where(finite, temperature, jnp.nan), self.lowest_temperature, self.highest_temperature
        ), state
