"""The Dirichlet sampler ("dslider"), the last version of Entropix, with its signs and derivatives corrected.

The sampler fits a Dirichlet distribution to the next-token distributions of the sequence so far. If the
entropy of a step is usual (an inlier), the token is drawn from the few most probable ones. Otherwise (an
outlier), the distribution is brought to a target entropy; if it is likely under the Dirichlet, it is also
mixed with the Dirichlet mean.

Source: xjdr-alt/entropix (2024), `dslider.py`, with the constants of its default configuration except where
a correction requires others. Differs from the source:

* The log-density of the Dirichlet has its normaliser with the correct sign.
* `expected_entropy` is the expected entropy of a draw; the release computes the differential entropy of the
  Dirichlet itself. `expected_varentropy` is the expectation of Var[−ln p]; the release drops both shifts and
  the square of the mean.
* The fit uses Newton's method with the exact inverse Jacobian; the release adds a second-order term with the
  wrong sign, in which a square is missing. A warm start makes a few iterations per step sufficient.
* The temperature for a target entropy comes from `control.temperature_solver.solve_temperature`. In the
  release, the third central moment of the second derivative has an extra factor 2 (see `entropy_slopes`).
* A step is an outlier if H exceeds the mean of the running entropies by a number of their deviations. With
  the positive coefficients and offset of the release, every step is one.
* The weight of the Dirichlet mean is in [0, 1] and decreases with the KL divergence to it. In the release, a
  base below 1 makes it negative, and the divergence has the wrong sign. The token is drawn from the mixture;
  the release takes its mode.
* Running means start at the first observation, not at zero. The running variances of the plain and the
  adapted cross-entropy are not swapped. No logarithm is applied twice.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln

from .. import entropy, sampling
from ..control.temperature_solver import solve_temperature
from ..sampling.randomness import random_bits
from ..state import Action, Signal
from ..state.pytree import STATIC, Gain, pytree
from .entropix import step_inputs

SHIFT = 6  # terms of the recurrence before the asymptotic series of the trigamma function
LEAST_SPREAD = 0.01  # nats of E[ln Σ]: the least variation assumed in a fit; without any, α is infinite
LONGEST_STEP = 1.0  # of ln α in one iteration
LOWEST, HIGHEST = 0.05, 20.0  # temperatures


def trigamma(x: jax.Array) -> jax.Array:
    """ψ₁(x) for x > 0, by recurrence and asymptotic series, to float32's precision.

    >>> round(float(trigamma(jnp.float32(1.0))), 5)  # π²/6
    1.64493
    """
    total = sum(1 / jnp.square(x + i) for i in range(SHIFT))
    y = 1 / (x + SHIFT)
    y2 = y * y
    return total + y + y2 / 2 + y * y2 * (1 / 6 - y2 * (1 / 30 - y2 * (1 / 42 - y2 / 30)))


def log_density(log_p: jax.Array, alpha: jax.Array) -> jax.Array:
    """The log-density ln Dir(p | α) = ln Γ(α₀) − Σ ln Γ(α) + Σ (α − 1) ln p."""
    normaliser = gammaln(alpha.sum(-1)) - gammaln(alpha).sum(-1)
    return normaliser + ((alpha - 1) * log_p).sum(-1)


def expected_entropy(alpha: jax.Array) -> jax.Array:
    """E[−Σ x ln x] for x from Dir(α), nats: ψ(α₀ + 1) − Σ (α/α₀) ψ(α + 1).

    >>> round(float(expected_entropy(jnp.ones(2))), 4)  # ½
    0.5
    """
    total = alpha.sum(-1)
    return digamma(total + 1) - (alpha / total[..., None] * digamma(alpha + 1)).sum(-1)


def expected_varentropy(alpha: jax.Array) -> jax.Array:
    """E[Σ x ln² x − (Σ x ln x)²] for x from Dir(α), nats².

    By the moments of Wolpert and Wolf (1995): with a = α₀,
        E[x ln² x]           = α/a · ((ψ(α + 1) − ψ(a + 1))² + ψ₁(α + 1) − ψ₁(a + 1))
        E[x y ln x ln y]     = αβ/(a (a + 1)) · ((ψ(α + 1) − ψ(a + 2))(ψ(β + 1) − ψ(a + 2)) − ψ₁(a + 2))
        E[x² ln² x]          = α(α + 1)/(a (a + 1)) · ((ψ(α + 2) − ψ(a + 2))² + ψ₁(α + 2) − ψ₁(a + 2))
    """
    total = alpha.sum(-1, keepdims=True)
    near = digamma(alpha + 1) - digamma(total + 1)
    square = (alpha / total * (near * near + trigamma(alpha + 1) - trigamma(total + 1))).sum(-1)
    far, rest = digamma(alpha + 1) - digamma(total + 2), trigamma(total + 2)
    product, diagonal = alpha * far, digamma(alpha + 2) - digamma(total + 2)
    pairs = product.sum(-1) ** 2 - (product * product).sum(-1)
    pairs -= rest[..., 0] * (alpha.sum(-1) ** 2 - (alpha * alpha).sum(-1))
    same = (alpha * (alpha + 1) * (diagonal * diagonal + trigamma(alpha + 2) - rest)).sum(-1)
    return jnp.maximum(square - (pairs + same) / (total * (total + 1))[..., 0], 0.0)


def entropy_slopes(logits: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dH/dT = V/T and d²H/dT² = −(μ₃ + 3 V)/T² of softmax(z/T); μ₃ = E[(ln p − E ln p)³]."""
    log_p = jax.nn.log_softmax(logits / temperature[..., None], -1)
    p = jnp.exp(log_p)
    distance = log_p - (p * log_p).sum(-1, keepdims=True)
    second, third = (p * distance**2).sum(-1), (p * distance**3).sum(-1)
    return second / temperature, -(third + 3 * second) / temperature**2


def fit(log_mean: jax.Array, alpha: jax.Array, iterations: int = 3) -> jax.Array:
    """The α of the Dirichlet distribution whose E[ln x] = ψ(α) − ψ(α₀) is `log_mean`, by Newton's method.

    This α maximises the likelihood, which depends on the observations through the mean of ln x only. The
    Jacobian is diag(ψ₁(α)) − ψ₁(α₀) 11ᵀ, inverted by the Sherman–Morrison formula. Steps are taken in ln α.
    If Σ exp(log_mean) leaves no room for variation, `LEAST_SPREAD` is assumed.

    Args:
        log_mean: `[..., n]`, the mean of ln x.
        alpha: `[..., n]`, the first guess, above 0.
        iterations: number of iterations of Newton's method; static.
    """
    room = jax.nn.logsumexp(log_mean, -1, keepdims=True) + LEAST_SPREAD
    target = log_mean - jnp.maximum(room, 0.0)

    def improve(_, alpha):
        total = alpha.sum(-1, keepdims=True)
        error = digamma(alpha) - digamma(total) - target
        slope, shared = 1 / trigamma(alpha), trigamma(total)
        shared_error = shared * (slope * error).sum(-1, keepdims=True)
        left = jnp.maximum(1 - shared * slope.sum(-1, keepdims=True), 1e-6)
        step = slope * (error + shared_error / left)
        return alpha * jnp.exp(jnp.clip(-step / alpha, -LONGEST_STEP, LONGEST_STEP))

    return jax.lax.fori_loop(0, iterations, improve, alpha)


class Running(NamedTuple):
    """Running means of a sequence; `[rows]`, the first two `[rows, support]`."""

    alpha: jax.Array  # of the Dirichlet
    log_mean: jax.Array  # of ln p
    seen: jax.Array  # int32, steps so far
    temperature: jax.Array
    entropy: jax.Array  # of softmax(z)
    varentropy: jax.Array
    adapted_entropy: jax.Array  # of the distribution that the token was drawn from
    adapted_varentropy: jax.Array
    surprisal: jax.Array  # of the token under softmax(z)
    surprisal_variance: jax.Array
    adapted_surprisal: jax.Array  # of the token under the distribution that it was drawn from
    adapted_variance: jax.Array
    strangeness: jax.Array  # −ln Dir(p | α)
    head_entropy: jax.Array  # of the `head` most probable tokens


def _blend(seen: jax.Array, rate: Gain, new: jax.Array, old: jax.Array) -> jax.Array:
    """A running mean that starts at its first observation."""
    weight = jnp.where(seen == 0, 1.0, rate)
    weight = weight.reshape(weight.shape + (1,) * (new.ndim - weight.ndim))
    return weight * new + (1 - weight) * old


def divergence(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """KL(p ‖ q), nats, ≥ 0 for Σ q ≤ 1."""
    p = jnp.exp(log_p)
    return jnp.maximum(jnp.where(p > 0, p * (log_p - log_q), 0.0).sum(-1), 0.0)


@pytree
class DSlider:
    """The Dirichlet sampler for a vocabulary; each row is a sequence with its own random keys.

    The Dirichlet is over the `support` lowest token ids (0: all), which are the most frequent ones in a BPE
    vocabulary. Other tokens keep their probability. Constants are those of the release's configuration unless
    the module docstring says otherwise; entropies are in nats. Greedy rows are not changed.
    """

    vocabulary: Annotated[int, STATIC]
    support: Annotated[int, STATIC] = 0
    head: Annotated[int, STATIC] = 3  # tokens that an inlier is drawn from
    rate: Gain = 0.15  # of all running means except that of ln p (`learning`)
    unusual: Gain = 0.5  # deviations above the running entropies
    sure: tuple[Gain, Gain] = (1.2, 0.1)  # an inlier is greedy below first · head entropy + second
    target: tuple[Gain, Gain, Gain] = (0.15, 1.2, 0.1)  # first · Σ running entropies + second / T + third
    known: tuple[Gain, Gain] = (1.2, 0.1)  # mixed below first · running strangeness + second
    pull: tuple[Gain, Gain] = (1 / 0.95, 2.5)  # 1 − first^(−second / KL)
    learning: tuple[Gain, Gain] = (1.5, 2.5)  # first^(−second / KL), the weight of a new ln p

    @property
    def size(self) -> int:
        """Tokens over which the running distributions extend."""
        return self.support or self.vocabulary

    def init(self, action: Action) -> Running:
        rows, n = action.temperature.shape[0], self.size
        even = jnp.full((rows, n), -jnp.log(jnp.float32(n)))
        zero = jnp.zeros(rows, jnp.float32)
        seen = jnp.zeros(rows, jnp.int32)
        return Running(jnp.ones((rows, n), jnp.float32), even, seen, zero + 1, *(zero,) * 10)

    def update(self, signal: Signal, action: Action, state: Running) -> tuple[Action, Running]:
        logits, key, warm = step_inputs(signal, action)
        log_p = jax.nn.log_softmax(logits, -1)
        plain = entropy.entropy_statistics(logits)
        levels = (state.surprisal, state.adapted_surprisal, state.entropy, state.adapted_entropy)
        variances = (
            state.surprisal_variance,
            state.adapted_variance,
            state.varentropy,
            state.adapted_varentropy,
        )
        level = sum(levels) / 4
        deviation = sum(jnp.sqrt(x) for x in variances) / 4
        outlier = (state.seen > 0) & (plain.entropy > level + self.unusual * deviation)

        # Inliers: the most probable token, or one of the `head` most probable at their usual entropy.
        top, place = jax.lax.top_k(logits, self.head)
        head_entropy = entropy.entropy_statistics(top).entropy
        usual = jnp.where(state.seen == 0, head_entropy, state.head_entropy)
        certain = head_entropy < self.sure[0] * usual + self.sure[1]
        span = jnp.full_like(level, LOWEST), jnp.full_like(level, HIGHEST)
        ones = jnp.ones_like(level)
        warmth = solve_temperature(top, usual, ones, *span)
        head_logits = jnp.full_like(logits, -jnp.inf)
        head_logits = head_logits.at[jnp.arange(len(place))[:, None], place].set(top / warmth[:, None])

        # Outliers: at the target entropy, mixed with the Dirichlet mean if likely under the Dirichlet.
        goal = self.target[0] * sum(levels) + self.target[1] / state.temperature + self.target[2]
        heat = solve_temperature(logits, goal, ones, *span)
        tuned = jax.nn.log_softmax(logits / heat[:, None], -1)
        part = tuned[:, : self.size]
        mass = jax.nn.logsumexp(part, -1, keepdims=True)
        part = part - mass
        strangeness = -log_density(part, state.alpha)
        limit = state.strangeness + (self.known[0] - 1) * jnp.abs(state.strangeness) + self.known[1]
        known = (state.seen > 1) & (strangeness < limit)
        mean = jnp.log(state.alpha / state.alpha.sum(-1, keepdims=True))
        gap = jnp.maximum(divergence(mean, part), 1e-6)
        share = jnp.where(known, 1 - jnp.power(self.pull[0], -self.pull[1] / gap), 0.0)[:, None]
        mixed = jnp.logaddexp(
            jnp.log(jnp.maximum(share, 1e-30)) + mean, jnp.log1p(-jnp.minimum(share, 1 - 1e-6)) + part
        )
        adapted = tuned.at[:, : self.size].set(mixed + mass)

        drawn_from = jnp.where(outlier[:, None], adapted, head_logits)
        bits = random_bits(key, self.vocabulary)
        drawn = jnp.argmax(drawn_from + sampling.gumbel(bits), -1)
        likeliest = jnp.argmax(logits, -1)
        token = jnp.where(~outlier & certain, likeliest, drawn).astype(jnp.int32)
        used = jnp.where(outlier, heat, jnp.where(certain, action.temperature, warmth))

        after = self.learn(state, log_p, adapted, part, token)
        mix = lambda new, old: _blend(state.seen, self.rate, new, old)
        after = after._replace(
            seen=state.seen + 1,
            temperature=heat,
            entropy=mix(plain.entropy, state.entropy),
            varentropy=mix(plain.varentropy, state.varentropy),
            strangeness=jnp.where(
                state.seen <= 1, strangeness, _blend(state.seen, self.rate, strangeness, state.strangeness)
            ),
            head_entropy=mix(head_entropy, state.head_entropy),
        )
        return action._replace(
            token=jnp.where(warm, token, -1), temperature=jnp.where(warm, used, action.temperature)
        ), after

    def learn(
        self, state: Running, log_p: jax.Array, adapted: jax.Array, part: jax.Array, token: jax.Array
    ) -> Running:
        """Updates the Dirichlet and the running surprisals with the distributions and the token of a step.

        Args:
            state: the state of the law.
            log_p: float32 `[rows, vocabulary]`, log-probabilities under the model.
            adapted: float32 `[rows, vocabulary]`, log-probabilities after the adaptation of outliers.
            part: float32 `[rows, n]`, log-probabilities of the tokens that the Dirichlet models.
            token: int32 `[rows]`, the token drawn.
        """
        mix = lambda new, old: _blend(state.seen, self.rate, new, old)
        gap = jnp.maximum(divergence(part, state.log_mean), 1e-6)
        weight = jnp.power(self.learning[0], -self.learning[1] / gap)
        floor = jnp.maximum(part, -30.0)  # ln 0 would never be forgotten
        log_mean = _blend(state.seen, weight, floor, state.log_mean)
        of = lambda x: -jnp.take_along_axis(x, token[:, None], 1)[:, 0]
        plain, token_adapted_surprisal = of(log_p), of(adapted)
        surprisal, adapted_surprisal = (
            mix(plain, state.surprisal),
            mix(token_adapted_surprisal, state.adapted_surprisal),
        )
        final = entropy.entropy_statistics(adapted)
        return state._replace(
            alpha=fit(log_mean, state.alpha),
            log_mean=log_mean,
            adapted_entropy=mix(final.entropy, state.adapted_entropy),
            adapted_varentropy=mix(final.varentropy, state.adapted_varentropy),
            surprisal=surprisal,
            surprisal_variance=mix((plain - surprisal) ** 2, state.surprisal_variance),
            adapted_surprisal=adapted_surprisal,
            adapted_variance=mix((token_adapted_surprisal - adapted_surprisal) ** 2, state.adapted_variance),
        )
