"""Temperature solver: the temperature at which the entropy of softmax(z / T) has a given value."""

import jax
import jax.numpy as jnp
from jax import lax

from ..entropy import at_temperature

MAX_ITERATIONS = 10  # of `solve_temperature`
TOLERANCE = 1e-4  # nats; an iterate this close gets one more step and is returned
SMALLEST = 1e-6  # nats and nats²; in float32 no smaller entropy differs from 0


def max_entropy(logits: jax.Array) -> jax.Array:
    """Ln k, where k tokens are not masked."""
    return jnp.log(jnp.maximum(jnp.sum(logits > -jnp.inf, axis=-1), 1).astype(jnp.float32))


@jax.custom_jvp
def solve_temperature(
    logits: jax.Array,
    target_entropy: jax.Array,
    start: jax.Array,
    lowest_temperature: jax.Array,
    highest_temperature: jax.Array,
) -> jax.Array:
    """Solves H(softmax(z / T)) = H* for the temperature T in [T_min, T_max].

    Safeguarded Newton iteration on ln T, with slope V_T, of ln H − ln(ln k − H), where k tokens are not
    masked. In these coordinates the curve is nearly straight at both ends. A step that leaves the bracket is
    replaced by the bracket's midpoint, or by the clip if that has not been evaluated. At most ten passes over
    the logits are made, and no more than the slowest row needs. Rows do not affect each other.

    Differentiable by the implicit function theorem, in forward and reverse mode, not through the iteration:
    dT / dH* = T / V_T; at a clip the derivative is that of the clip.

    Args:
        logits: float32 `[rows, vocabulary]`.
        target_entropy: H*, nats, float32 `[rows]`.
        start: temperature to start from, float32 `[rows]`; where it is 0 the result is 0.
        lowest_temperature: T_min > 0, float32 `[rows]`.
        highest_temperature: T_max > 0, float32 `[rows]`.

    Returns:
        T, float32 `[rows]`: the nearer clip where no T in the range reaches the target, and some finite value
        where the logits hold NaN.

    >>> rows = lambda x: jnp.full(1, x)
    >>> logits = jnp.log(jnp.array([[0.7, 0.2, 0.1]]))
    >>> temperature = solve_temperature(logits, rows(1.0), rows(1.0), rows(0.1), rows(9.0))
    >>> round(float(at_temperature(logits, temperature).entropy[0]), 4)
    1.0
    """
    log_k = max_entropy(logits)
    warm = start > 0
    log_lowest, log_highest = jnp.log(lowest_temperature), jnp.log(highest_temperature)

    def headroom(entropy: jax.Array) -> jax.Array:
        return jnp.maximum(log_k - entropy, SMALLEST)

    def straighten(entropy: jax.Array) -> jax.Array:
        return jnp.log(jnp.maximum(entropy, SMALLEST)) - jnp.log(headroom(entropy))

    def refine(carry):
        iteration, point, left, right, untried, settled = carry
        current = at_temperature(logits, jnp.exp(point))
        above = current.entropy > target_entropy
        slope = current.varentropy * (
            1 / jnp.maximum(current.entropy, SMALLEST) + 1 / headroom(current.entropy)
        )
        error = straighten(current.entropy) - straighten(target_entropy)
        newton = point - error / jnp.maximum(slope, SMALLEST)
        left, right = jnp.where(above, left, point), jnp.where(above, point, right)
        untried = untried[0] & above, untried[1] & ~above  # the bracket still ends at a clip not evaluated
        middle = (left + right) / 2
        guarded = jnp.where(newton < left, jnp.where(untried[0], left, middle), newton)
        guarded = jnp.where(newton > right, jnp.where(untried[1], right, middle), guarded)
        close = jnp.abs(current.entropy - target_entropy) < TOLERANCE
        # Where the curve is almost flat, a step from close by may lead far away.
        astray = (close & (jnp.abs(guarded - point) > 0.01)) | ~jnp.isfinite(current.entropy)
        guarded = jnp.where(astray, point, guarded)
        arrived = close | (guarded == point)
        point = jnp.where(settled, point, guarded)
        return iteration + 1, point, left, right, untried, settled | arrived

    first = jnp.clip(jnp.log(jnp.where(warm, start, 1.0)), log_lowest, log_highest)
    all_rows = jnp.ones(start.shape, bool)
    carry = (jnp.int32(0), first, log_lowest, log_highest, (all_rows, all_rows), ~warm)
    _, point, *_ = lax.while_loop(lambda c: (c[0] < MAX_ITERATIONS) & ~c[-1].all(), refine, carry)
    temperature = jnp.where(point >= log_highest, highest_temperature, jnp.exp(point))
    temperature = jnp.where(point <= log_lowest, lowest_temperature, temperature)
    return jnp.where(warm, temperature, 0.0)


@solve_temperature.defjvp
def _implicit_jvp(primals, tangents):
    logits, _, start, lowest_temperature, highest_temperature = primals
    d_logits, d_target, _, d_lowest, d_highest = tangents
    temperature = solve_temperature(*primals)
    current, change = jax.jvp(lambda z: at_temperature(z, temperature), (logits,), (d_logits,))
    inside = temperature * (d_target - change.entropy) / jnp.maximum(current.varentropy, SMALLEST)
    tangent = jnp.where(temperature >= highest_temperature, d_highest, inside)
    tangent = jnp.where(temperature <= lowest_temperature, d_lowest, tangent)
    return temperature, jnp.where(start > 0, tangent, 0.0)
