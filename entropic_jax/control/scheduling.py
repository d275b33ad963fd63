"""Macro: which sequences advance in the next step, and by how many tokens.

A step has room for `width` sequences. Every law here ranks those that can run, lets the first `width` advance
and writes `Action.quota`; where all fit, it is the identity. Entropy a law sees by itself; what the host
knows of cost, memory, deadlines and lengths it hands over between launches, as a `Demand`.

Source: Kiruluta 2026, Entropic-Time Inference, arXiv 2603.03310 (entropy-aware scheduling); deviations are
stated where they occur.
"""

from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import ndtr

from ..state import Action, Signal
from .controller import STATIC, pytree

PRIOR_TOKENS = 8  # tokens a sequence must have emitted before its own moments count; also the prior's weight
LARGEST_ENTROPY = 100.0  # nats; no vocabulary reaches it, and its square is far from overflow
LARGEST_CORRELATION = 0.99
SMALLEST_SCALE = 1e-6  # nats; keeps the ratio d / σ and its gradient finite where nothing varies
SMALLEST_LOAD = 0.05  # of the denominator of the priority, whose weights add up to about 1
SMALLEST_DIVISOR = 1e-6  # of the printed priority, which has no floor: only so much that nothing is infinite
UNKNOWN_END = 2**30  # positions


class Moments(NamedTuple):
    """H' = μ + ρ (H − μ) + σ ε with ε ~ N(0, 1): the entropy of the next token, given that of the last."""

    mean: Any  # μ, nats
    scale: Any  # σ of what the last token does not explain, nats, > 0
    correlation: Any  # ρ, in [−0.99, 0.99]


PRIOR = Moments(mean=2.0, scale=1.5, correlation=0.2)  # of text in general, until some was seen


class Predictor(NamedTuple):
    """Running moments of H₁ and of its pairs of neighbours; each `[rows]`, float32 except the count."""

    count: jax.Array  # int32, tokens observed
    last: jax.Array  # H₁ of the newest token
    before: jax.Array  # mean of all tokens but the newest
    after: jax.Array  # mean of all tokens but the first
    before_variance: jax.Array  # of the same, in nats²
    after_variance: jax.Array
    covariance: jax.Array  # of a token with the next one


class Demand(NamedTuple):
    """What the host knows of the sequences; each `[rows]`."""

    cost: jax.Array  # float32, C: expected roofline seconds of the sequence's step, normalised to [0, 1]
    memory: jax.Array  # float32, M: KV pages held / pages of the pool, in [0, 1]
    slack: jax.Array  # float32: time left to the deadline, normalised to [0, 1]; 1 is without haste
    expected_end: jax.Array  # int32, positions (prompt included) that the sequence is predicted to end with
    true_end: jax.Array  # int32, the same as an oracle knows it
    arrival: jax.Array  # int32, a serial number of the request: smaller came first, and no two are equal


class Schedule(NamedTuple):
    """The state of every law of this file; each `[rows]`."""

    predictor: Predictor
    wait: jax.Array  # int32, steps since the sequence had its turn
    chosen: jax.Array  # bool, has its turn in the next step
    demand: Demand


def new_predictor(rows: int) -> Predictor:
    """The predictor before the first token."""
    zero = jnp.zeros(rows, jnp.float32)
    return Predictor(jnp.zeros(rows, jnp.int32), zero, zero, zero, zero, zero, zero)


def observe(predictor: Predictor, entropy: jax.Array, emitting: jax.Array) -> Predictor:
    """Enter the entropy H₁ (nats, `[rows]`) of the sequences that emitted a token.

    The moments are updated from their differences to it, so nothing cancels however long the sequence grows.
    What is not finite is left out; what lies outside [0, 100] counts as its nearest end.

    >>> seen = observe(new_predictor(2), jnp.array([3.0, 5.0]), jnp.array([True, False]))
    >>> seen.count.tolist(), seen.last.tolist()
    ([1, 0], [3.0, 0.0])
    """
    emitting = emitting & jnp.isfinite(entropy)
    now = jnp.clip(jnp.where(emitting, entropy, 0.0), 0.0, LARGEST_ENTROPY)
    # The pairs are as many as the old count; what the first token leaves, the second overwrites.
    rate = 1 / jnp.maximum(predictor.count, 1).astype(jnp.float32)
    from_before, from_after = predictor.last - predictor.before, now - predictor.after
    before, after = predictor.before + rate * from_before, predictor.after + rate * from_after
    mix = lambda old, new: old + rate * (new - old)
    seen = Predictor(
        count=predictor.count + 1,
        last=now,
        before=before,
        after=after,
        before_variance=mix(predictor.before_variance, from_before * (predictor.last - before)),
        after_variance=mix(predictor.after_variance, from_after * (now - after)),
        covariance=mix(predictor.covariance, from_before * (now - after)),
    )
    return jax.tree.map(lambda new, old: jnp.where(emitting, new, old), seen, predictor)


def _fit(mean, before_variance, after_variance, covariance) -> Moments:
    spread = jnp.sqrt(jnp.maximum(before_variance * after_variance, SMALLEST_SCALE**4))
    correlation = jnp.clip(covariance / spread, -LARGEST_CORRELATION, LARGEST_CORRELATION)
    unexplained = after_variance * (1 - correlation**2)
    return Moments(mean, jnp.sqrt(jnp.maximum(unexplained, SMALLEST_SCALE**2)), correlation)


def _pooled(predictor: Predictor, pairs: jax.Array, prior: Moments) -> Moments:
    """Moments over the pairs of all sequences, within and between them, the prior as if one of them."""
    variance = prior.scale**2 / (1 - prior.correlation**2)
    weight = jnp.append(pairs, float(PRIOR_TOKENS))
    mean = lambda x: jnp.sum(weight * x) / jnp.sum(weight)
    before, after = jnp.append(predictor.before, prior.mean), jnp.append(predictor.after, prior.mean)
    spread = lambda inside, of_prior, x, y: mean(jnp.append(inside, of_prior) + (x - mean(x)) * (y - mean(y)))
    return _fit(
        (mean(before) + mean(after)) / 2,
        spread(predictor.before_variance, variance, before, before),
        spread(predictor.after_variance, variance, after, after),
        spread(predictor.covariance, prior.correlation * variance, before, after),
    )


def moments(predictor: Predictor, prior: Moments) -> Moments:
    """The moments of each sequence, `[rows]`; over its first 8 tokens those of all sequences together.

        μ = mean H,   ρ = corr(H[t−1], H[t]),   σ² = Var H · (1 − ρ²)

    Nats; ρ in [−0.99, 0.99] and σ ≥ 1e-6, so both are finite for constant series too. To the pool of all
    sequences the prior adds the weight of 8 tokens. Differentiable in the entropies and the prior.
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310), which leaves open how the drop is predicted.

    >>> first = moments(new_predictor(1), Moments(2.0, 1.0, 0.5))
    >>> [round(float(x[0]), 3) for x in first]
    [2.0, 1.0, 0.5]
    """
    pairs = jnp.maximum(predictor.count - 1, 0).astype(jnp.float32)
    own = _fit(
        (predictor.before * pairs + predictor.last) / (pairs + 1),
        predictor.before_variance,
        predictor.after_variance,
        predictor.covariance,
    )
    pooled = _pooled(predictor, pairs, prior)
    return jax.tree.map(lambda x, y: jnp.where(predictor.count > PRIOR_TOKENS, x, y), own, pooled)


def expected_drop(entropy: jax.Array, given: Moments) -> jax.Array:
    """E[ΔH⁺], by how much the next token is expected to lower the entropy, rises counted as 0; nats, ≥ 0.

        E[max(0, H − H')] = d Φ(d/σ) + σ φ(d/σ),   d = (1 − ρ)(H − μ)

    with Φ and φ the standard normal distribution and density; H' is not held to be positive. Differentiable:
    the slope in d is Φ(d/σ), in σ it is φ(d/σ). A σ below 1e-6 counts as that.
    Source: Kiruluta 2026, arXiv 2603.03310, the expected irreversible entropy drop; the closed form is ours.

    >>> round(float(expected_drop(jnp.float32(2.0), Moments(2.0, 1.0, 0.0))), 4)  # 1 / √(2π)
    0.3989
    """
    scale = jnp.maximum(given.scale, SMALLEST_SCALE)
    mean = (1 - given.correlation) * (entropy - given.mean)
    ratio = mean / scale
    density = jnp.exp(-0.5 * ratio**2) / (2 * jnp.pi) ** 0.5
    return jnp.maximum(mean * ndtr(ratio) + scale * density, 0.0)


def predicted_drop(predictor: Predictor, prior: Moments) -> jax.Array:
    """E[ΔH⁺] of every sequence `[rows]` from what was observed of it; before its first token with H = μ.

    >>> round(float(predicted_drop(new_predictor(1), Moments(2.0, 1.0, 0.0))[0]), 4)
    0.3989
    """
    given = moments(predictor, prior)
    return expected_drop(jnp.where(predictor.count > 0, predictor.last, given.mean), given)


def priority(drop, demand: Demand, wait, *, cost, memory, slack, ageing, bound) -> jax.Array:
    """The entropic priority of each sequence, `[rows]`, in nats per unit of load.

        π = clip(E[ΔH⁺] / max(α C + β M + γ slack, 0.05), 0, B) + a · wait

    Weights cost α, memory β, slack γ ≥ 0; bound B > 0; ageing a > 0 per step. Ageing comes after division and
    clip, so whoever waits overtakes in the end: among n sequences of which c advance in a step, none waits
    longer than B/a + ⌈n/c⌉ steps. Differentiable in the drop, the demand and all five gains, except where
    floor or clip sets in.
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310): what is left to the deadline stands in the
    denominator in place of the urgency, which would make the urgent wait; ageing, bound and floor are added.

    >>> gains = dict(cost=1.0, memory=0.0, slack=0.0, ageing=0.05, bound=4.0)
    >>> priority(jnp.full(2, 0.5), no_demand(2), jnp.array([0, 10]), **gains).tolist()
    [0.5, 1.0]
    """
    load = cost * demand.cost + memory * demand.memory + slack * demand.slack
    load = jnp.where(load > SMALLEST_LOAD, load, SMALLEST_LOAD)  # a load that is NaN counts as the smallest
    return jnp.clip(drop / load, 0.0, bound) + ageing * wait.astype(jnp.float32)


def printed_priority(drop, demand: Demand, *, cost, memory, urgency) -> jax.Array:
    """The paper's priority of each sequence, `[rows]`: π = E[ΔH⁺] / (α C + β M + γ (1 − slack)).

    As printed in Kiruluta 2026, arXiv 2603.03310, with urgency = 1 − slack; a divisor below 1e-6 counts as
    that. Kept by name for comparison: the urgent wait, and no bound holds for how long.

    >>> demand = no_demand(2)._replace(slack=jnp.array([0.0, 1.0]))
    >>> printed_priority(jnp.ones(2), demand, cost=0.5, memory=0.5, urgency=0.5).tolist()
    [1.0, 2.0]
    """
    load = cost * demand.cost + memory * demand.memory + urgency * (1 - demand.slack)
    return drop / jnp.where(load > SMALLEST_DIVISOR, load, SMALLEST_DIVISOR)


def no_demand(rows: int) -> Demand:
    """Nothing is known: equal cost, no pressure, no haste, no end in sight, first come in order of rows."""
    end = jnp.full(rows, UNKNOWN_END, jnp.int32)
    one, zero = jnp.ones(rows, jnp.float32), jnp.zeros(rows, jnp.float32)
    return Demand(one, zero, one, end, end, jnp.arange(rows, dtype=jnp.int32))


def with_demand(control: Any, demand: Demand) -> Any:
    """The controller state with a new demand, wherever in it (a chain, say) a law of this file keeps one.

    A row whose arrival has changed holds another sequence: what was learnt of the one before is forgotten.
    The arrays are copied, as a launch consumes the state.

    >>> state = FirstComeFirstServed(1).init(Action(*[jnp.ones(2)] * 4))
    >>> with_demand((state,), no_demand(2)._replace(arrival=jnp.array([7, 1])))[0].demand.arrival.tolist()
    [7, 1]
    """

    def replace(state):
        if not isinstance(state, Schedule):
            return state
        copied = jax.tree.map(lambda new, old: jnp.array(new, old.dtype), demand, state.demand)
        same = copied.arrival == state.demand.arrival
        return jax.tree.map(lambda x: jnp.where(same, x, jnp.zeros_like(x)), state)._replace(demand=copied)

    return jax.tree.map(replace, control, is_leaf=lambda x: isinstance(x, Schedule))


def choose(score: jax.Array, wait: jax.Array, runnable: jax.Array, width: int) -> jax.Array:
    """The `width` runnable sequences of greatest score: bool `[rows]`. Ties: longer wait, then lower index.

    >>> choose(jnp.array([1.0, 2.0, 2.0, 9.0]), jnp.array([0, 0, 5, 0]), jnp.arange(4) < 3, 1).tolist()
    [False, False, True, False]
    """
    index = jnp.arange(score.shape[0], dtype=jnp.int32)
    order = lax.sort((1 - runnable.astype(jnp.int32), -score, -wait, index), num_keys=4)[-1]
    return jnp.zeros_like(runnable).at[order[:width]].set(True) & runnable


def share(weight: jax.Array, chosen: jax.Array, drafts: Any, most: int) -> jax.Array:
    """Draft tokens for the chosen, int32 `[rows]`, in proportion to their weight and at most `most` each.

    `drafts` are shared out in all, one by one to whoever has the greatest weight / (2 · share + 1), which
    keeps every share near its proportion (Sainte-Laguë's method); None is no limit.

    >>> share(jnp.array([3.0, 1.0, 9.0]), jnp.array([True, True, False]), 4, 8).tolist()
    [3, 1, 0]
    """
    if drafts is None or most == 0:
        return most * chosen.astype(jnp.int32)
    divisor = 2 * jnp.arange(most, dtype=jnp.float32) + 1
    quotient = jnp.maximum(weight, SMALLEST_SCALE)[:, None] / divisor
    open_to = jnp.broadcast_to(chosen[:, None], quotient.shape)
    index = jnp.arange(quotient.size, dtype=jnp.int32)
    order = lax.sort((1 - open_to.ravel().astype(jnp.int32), -quotient.ravel(), index), num_keys=3)[-1]
    rank = jnp.zeros_like(index).at[order].set(index).reshape(quotient.shape)
    return jnp.sum((rank < drafts) & open_to, axis=1, dtype=jnp.int32)


@pytree
class _Law:
    """What the laws have in common: all but the score by which they rank."""

    width: Annotated[int, STATIC]  # c, sequences that advance in a step
    most_quota: Annotated[int, STATIC] = 1  # tokens of a sequence in a step, drafts included
    drafts: Any = None  # draft tokens of a step in all; None is no limit
    across_rows: ClassVar[bool] = True

    def score(self, signal: Signal, state: Schedule) -> jax.Array:
        raise NotImplementedError

    def init(self, action: Action) -> Schedule:
        for name in ("width", "most_quota"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted are whole numbers from 1")
        rows = action.quota.shape[0]
        nobody = jnp.zeros(rows, bool)
        return Schedule(new_predictor(rows), nobody.astype(jnp.int32), nobody, no_demand(rows))

    def update(self, signal: Signal, action: Action, state: Schedule) -> tuple[Action, Schedule]:
        # Who was chosen and found no page has had a turn too: such rows would hold every place for ever.
        waits = signal.runnable & ~(signal.emitting | state.chosen)
        predictor = observe(state.predictor, signal.entropy, signal.emitting)
        state = state._replace(predictor=predictor, wait=jnp.where(waits, state.wait + 1, 0))
        score = self.score(signal, state)
        chosen = choose(score, state.wait, signal.runnable, self.width)
        # Where all fit, rows that have ended keep 1, as in an action that nobody rewrote.
        fits = jnp.sum(signal.runnable, dtype=jnp.int32) <= self.width
        # A score in whole numbers gives the order only: drafts are shared evenly.
        weight = score if jnp.issubdtype(score.dtype, jnp.floating) else jnp.ones(score.shape, jnp.float32)
        quota = (fits | chosen).astype(jnp.int32) + share(weight, chosen, self.drafts, self.most_quota - 1)
        return action._replace(quota=quota), state._replace(chosen=chosen)


@pytree
class Scheduling(_Law):
    """Serve first where a step resolves most per unit of load, and let no one wait for ever.

        π = clip(E[ΔH⁺] / max(α C + β M + γ slack, 0.05), 0, B) + a · wait

    The `width` runnable sequences of greatest π advance; ties go to the longer wait, then to the lower index.
    The longest wait is B/a + ⌈n/c⌉ steps for n sequences and c = width: with the defaults, 80 + ⌈n/c⌉. With
    `most_quota` n > 1 each may draft up to n − 1 tokens, and at most `drafts` in all, shared by π. The choice
    itself is a step function of the gains; `priority` is differentiable.
    Differs from the paper (Kiruluta 2026, arXiv 2603.03310): see `priority`.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> law, action = Scheduling(width=1), plain_action(jnp.ones(2))
    >>> signal = quiet_signal(2)._replace(runnable=jnp.ones(2, bool), emitting=jnp.array([True, False]))
    >>> law.update(signal, action, law.init(action))[0].quota.tolist()
    [0, 1]
    """

    cost: Any = 0.5  # α
    memory: Any = 0.25  # β
    slack: Any = 0.25  # γ
    ageing: Any = 0.05  # a, per step
    bound: Any = 4.0  # B
    prior: Moments = PRIOR

    def score(self, signal: Signal, state: Schedule) -> jax.Array:
        gains = dict(cost=self.cost, memory=self.memory, slack=self.slack)
        drop = predicted_drop(state.predictor, self.prior)
        return priority(drop, state.demand, state.wait, **gains, ageing=self.ageing, bound=self.bound)


@pytree
class PaperScheduling(_Law):
    """The paper's law as printed: π = E[ΔH⁺] / (α C + β M + γ urgency), the greatest first.

    Kept for comparison. Its claim that no sequence starves is false: whoever keeps a smaller π is never
    served, and urgency lowers π. E[ΔH⁺] is predicted, and ties are broken, as in `Scheduling`.
    Source: Kiruluta 2026, arXiv 2603.03310; see `printed_priority`.
    """

    cost: Any = 0.5  # α
    memory: Any = 0.25  # β
    urgency: Any = 0.25  # γ
    prior: Moments = PRIOR

    def score(self, signal: Signal, state: Schedule) -> jax.Array:
        gains = dict(cost=self.cost, memory=self.memory, urgency=self.urgency)
        return printed_priority(predicted_drop(state.predictor, self.prior), state.demand, **gains)


@pytree
class FirstComeFirstServed(_Law):
    """The sequences in order of arrival, each to its end: the baseline. Drafts are shared evenly."""

    def score(self, signal: Signal, state: Schedule) -> jax.Array:
        return -state.demand.arrival


@pytree
class ShortestJob(_Law):
    """The sequences with the fewest tokens to go, as an oracle knows them (`Demand.true_end`), first.

    Where all arrive together, no law has a smaller mean completion time. Drafts are shared evenly.
    """

    def score(self, signal: Signal, state: Schedule) -> jax.Array:
        return -jnp.maximum(state.demand.true_end - signal.length, 0)


@pytree
class ShortestRemaining(_Law):
    """The sequences with the fewest tokens to go by prediction (`Demand.expected_end`) first.

    A sequence that outlives its prediction has none to go, and stays first. Drafts are shared evenly.
    """

    def score(self, signal: Signal, state: Schedule) -> jax.Array:
        return -jnp.maximum(state.demand.expected_end - signal.length, 0)


SCHEDULES: dict[str, type] = {
    "entropic": Scheduling,
    "paper": PaperScheduling,
    "fcfs": FirstComeFirstServed,
    "shortest-job": ShortestJob,
    "shortest-remaining": ShortestRemaining,
}
