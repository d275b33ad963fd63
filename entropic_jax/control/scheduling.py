"""Scheduling laws, the macro scale: which sequences advance in the next step.

A step advances at most `width` sequences. Every law ranks the runnable rows, lets the first `width` advance
and writes `Action.quota`; where all of them fit, it is the identity. The law observes entropy itself; cost,
memory pressure, deadlines and lengths come from the host between launches, as a `RowLoad`.

Source: Kiruluta 2026, Entropic-Time Inference, arXiv 2603.03310 (entropy-aware scheduling); deviations are
stated where they occur.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..state import Action, SchedulingSignal, Signal
from ..state.pytree import STATIC, Gain, pytree
from .entropy_drop import (
    AR1,
    PRIOR,
    EntropyPredictor,
    new_predictor,
    predicted_drop,
    update_predictor,
)

SMALLEST_LOAD = 0.05  # floor of the denominator of the priority, whose weights add up to about 1
SMALLEST_DIVISOR = 1e-6  # floor of the printed priority, which has none: just enough to stay finite
UNKNOWN_END = 2**30  # positions

Array = jax.Array | np.ndarray  # on the device, or on the host of a serving engine


class RowLoad(NamedTuple):
    """The load of each row's sequence, as the host knows it; each `[rows]`."""

    cost: Array  # float32, C: expected roofline seconds of the next step, normalised to [0, 1]
    memory: Array  # float32, M: KV pages held / pages of the pool, in [0, 1]
    slack: Array  # float32: time left to the deadline, normalised to [0, 1]; 1 is no deadline
    expected_end: Array  # int32, predicted final length in positions, prompt included
    true_end: Array  # int32, the actual final length, for oracle baselines
    arrival: Array  # int32, serial number of the request: unique, smaller arrived earlier


class ScheduleState(NamedTuple):
    """The state of every law of this file; each `[rows]`."""

    predictor: EntropyPredictor
    wait: jax.Array  # int32, steps since the sequence was last selected
    selected: jax.Array  # bool, advances in the next step
    load: RowLoad


def priority(
    drop: Array,
    load: RowLoad,
    wait: Array,
    *,
    cost: Array | float,
    memory: Array | float,
    slack: Array | float,
    ageing: Array | float,
    bound: Array | float,
    xp: Any = jnp,
) -> Any:
    """The entropic priority of each row, `[rows]`, in nats per unit of load.

        π = clip(E[ΔH⁺] / max(α C + β M + γ slack, 0.05), 0, B) + a · wait

    Ageing is added after division and clip, so every waiting row overtakes eventually: among n sequences of
    which c advance per step, none waits longer than B/a + ⌈n/c⌉ steps. Differentiable in the drop, the load
    and all five gains, except where floor or clip applies.

    Args:
        drop: E[ΔH⁺], nats, `[rows]`, see `entropy_drop.predicted_drop`.
        load: cost, memory and slack of each row, in [0, 1].
        wait: int32 `[rows]`, steps since the row last advanced.
        cost: weight α ≥ 0 of the expected cost.
        memory: weight β ≥ 0 of the KV cache held.
        slack: weight γ ≥ 0 of the time left to the deadline.
        ageing: a > 0, priority gained per step of waiting.
        bound: B > 0, largest priority before ageing.
        xp: namespace of the arrays, `jax.numpy` on the device and `numpy` on the host.

    Differs from the paper (Kiruluta 2026, arXiv 2603.03310): the denominator holds the slack instead of the
    urgency, which would make urgent requests wait; ageing, bound and floor are added.

    >>> gains = dict(cost=1.0, memory=0.0, slack=0.0, ageing=0.05, bound=4.0)
    >>> priority(jnp.full(2, 0.5), default_load(2), jnp.array([0, 10]), **gains).tolist()
    [0.5, 1.0]
    """
    total = cost * load.cost + memory * load.memory + slack * load.slack
    total = xp.where(total > SMALLEST_LOAD, total, SMALLEST_LOAD)  # NaN counts as the smallest load
    return xp.clip(drop / total, 0.0, bound) + ageing * wait.astype(drop.dtype)


def printed_priority(
    drop: jax.Array,
    load: RowLoad,
    *,
    cost: jax.Array | float,
    memory: jax.Array | float,
    urgency: jax.Array | float,
) -> jax.Array:
    """The paper's priority of each row, float32 `[rows]`: π = E[ΔH⁺] / (α C + β M + γ (1 − slack)).

    Kept for comparison: urgent requests wait, and waiting times are unbounded. A divisor below 1e-6 counts as
    1e-6.

    Args:
        drop: E[ΔH⁺], nats, `[rows]`.
        load: cost, memory and slack of each row, in [0, 1].
        cost: weight α ≥ 0 of the expected cost.
        memory: weight β ≥ 0 of the KV cache held.
        urgency: weight γ ≥ 0 of 1 − slack.

    Source: Kiruluta 2026, arXiv 2603.03310, as printed, with urgency = 1 − slack.

    >>> load = default_load(2)._replace(slack=jnp.array([0.0, 1.0]))
    >>> printed_priority(jnp.ones(2), load, cost=0.5, memory=0.5, urgency=0.5).tolist()
    [1.0, 2.0]
    """
    total = cost * load.cost + memory * load.memory + urgency * (1 - load.slack)
    return drop / jnp.where(total > SMALLEST_DIVISOR, total, SMALLEST_DIVISOR)


def default_load(rows: int) -> RowLoad:
    """The load of rows of which nothing is known: equal cost, no deadline, unknown end, arrival by row."""
    end = jnp.full(rows, UNKNOWN_END, jnp.int32)
    ones, zeros = jnp.ones(rows, jnp.float32), jnp.zeros(rows, jnp.float32)
    return RowLoad(ones, zeros, ones, end, end, jnp.arange(rows, dtype=jnp.int32))


def relative_load(work: Array, length: Array, xp: Any = jnp) -> tuple[Any, Any]:
    """The expected cost and the KV cache of each row, in [0, 1]: relative to the largest.

    Args:
        work: what a row still costs, tokens or seconds, `[rows]`.
        length: positions that it holds at its end, `[rows]`.
        xp: namespace of the arrays, `jax.numpy` or `numpy`.

    >>> [x.tolist() for x in relative_load(jnp.array([20, 5]), jnp.array([60, 15]))]
    [[1.0, 0.25], [1.0, 0.25]]
    """
    return work / xp.maximum(work.max(), 1), length / xp.maximum(length.max(), 1)


def with_load(control: Any, load: RowLoad) -> Any:
    """The controller state with `load` in every `ScheduleState` it contains.

    Rows whose arrival number changed hold a new sequence: their predictor and waiting time are reset. The
    arrays are copied, because a launch donates the state.

    >>> from entropic_jax.state import plain_action
    >>> state = FirstComeFirstServed(1).init(plain_action(jnp.ones(2)))
    >>> with_load((state,), default_load(2)._replace(arrival=jnp.array([7, 1])))[0].load.arrival.tolist()
    [7, 1]
    """

    def replace(state):
        if not isinstance(state, ScheduleState):
            return state
        copied = jax.tree.map(lambda new, old: jnp.array(new, old.dtype), load, state.load)
        same = copied.arrival == state.load.arrival
        return jax.tree.map(lambda x: jnp.where(same, x, jnp.zeros_like(x)), state)._replace(load=copied)

    return jax.tree.map(replace, control, is_leaf=lambda x: isinstance(x, ScheduleState))


def select_rows(score: jax.Array, wait: jax.Array, runnable: jax.Array, width: int) -> jax.Array:
    """Selects the `width` runnable rows of highest score.

    Args:
        score: `[rows]`, float or int.
        wait: int32 `[rows]`; of equal scores the longer wait wins, then the lower index.
        runnable: bool `[rows]`.
        width: most rows to select; static.

    Returns:
        bool `[rows]`.

    >>> select_rows(jnp.array([1.0, 2.0, 2.0, 9.0]), jnp.array([0, 0, 5, 0]), jnp.arange(4) < 3, 1).tolist()
    [False, False, True, False]
    """
    index = jnp.arange(score.shape[0], dtype=jnp.int32)
    order = lax.sort((1 - runnable.astype(jnp.int32), -score, -wait, index), num_keys=4)[-1]
    return jnp.zeros_like(runnable).at[order[:width]].set(True) & runnable


@pytree
class _SchedulingLaw:
    """Everything the laws share; a law adds the `score` that rows are ranked by."""

    width: Annotated[int, STATIC]  # c, sequences that advance in a step

    def score(self, signal: SchedulingSignal, state: ScheduleState) -> jax.Array:
        """The rank of each row, `[rows]`: the highest advance first."""
        raise NotImplementedError

    def init(self, action: Action) -> ScheduleState:
        """See `Controller`. Raises ValueError for a width below 1."""
        if self.width < 1:
            raise ValueError(f"width must be an integer of at least 1; got {self.width}")
        rows = action.quota.shape[0]
        none_selected = jnp.zeros(rows, bool)
        return ScheduleState(
            new_predictor(rows), none_selected.astype(jnp.int32), none_selected, default_load(rows)
        )

    def update(self, signal: Signal, action: Action, state: ScheduleState) -> tuple[Action, ScheduleState]:
        """See `Controller`: the predictor observes each token, also where a pass emits several.

        Args:
            signal: the measurements of the token.
            action: in force.
            state: the state of the law.
        """
        predictor = update_predictor(state.predictor, signal.entropy, signal.emitting)
        return action, state._replace(predictor=predictor)

    def schedule(
        self, signal: SchedulingSignal, action: Action, state: ScheduleState
    ) -> tuple[Action, ScheduleState]:
        """See `Controller`: writes `quota`.

        Args:
            signal: the signal of all rows, after sampling.
            action: in force.
            state: the state of the law.
        """
        # A selected row that got no page does not count as waiting: it would be selected forever.
        waits = signal.runnable & ~(signal.emitting | state.selected)
        state = state._replace(wait=jnp.where(waits, state.wait + 1, 0))
        score = self.score(signal, state)
        selected = select_rows(score, state.wait, signal.runnable, self.width)
        # Where all fit, ended rows keep quota 1, as in an action that no law has rewritten.
        all_fit = jnp.sum(signal.runnable, dtype=jnp.int32) <= self.width
        quota = (all_fit | selected).astype(jnp.int32)
        return action._replace(quota=quota), state._replace(selected=selected)


@pytree
class Scheduling(_SchedulingLaw):
    """Entropic scheduling: rows that resolve most entropy per unit of load advance first, with ageing.

        π = clip(E[ΔH⁺] / max(α C + β M + γ slack, 0.05), 0, B) + a · wait

    The `width` runnable rows of highest π advance; ties go to the longer wait, then to the lower index. The
    longest wait is B/a + ⌈n/c⌉ steps for n sequences and c = width: 80 + ⌈n/c⌉ with the defaults. The
    selection is a step function of the gains; `priority` itself is differentiable.

    Args:
        width: c ≥ 1, rows that advance in a step; static.
        cost: α ≥ 0, weight of the expected cost.
        memory: β ≥ 0, weight of the KV cache held.
        slack: γ ≥ 0, weight of the time left to the deadline.
        ageing: a > 0, per step.
        bound: B > 0, largest priority before ageing.
        prior: AR(1) of the entropy before tokens were observed.

    Differs from the paper (Kiruluta 2026, arXiv 2603.03310): see `priority`.

    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> law, action = Scheduling(width=1), plain_action(jnp.ones(2))
    >>> signal = quiet_signal(2)._replace(runnable=jnp.ones(2, bool), emitting=jnp.array([True, False]))
    >>> law.schedule(signal, action, law.init(action))[0].quota.tolist()
    [0, 1]
    """

    cost: Gain = 0.5
    memory: Gain = 0.25
    slack: Gain = 0.25
    ageing: Gain = 0.05
    bound: Gain = 4.0
    prior: AR1 = PRIOR

    def score(self, signal: SchedulingSignal, state: ScheduleState) -> jax.Array:
        """See `_SchedulingLaw`: π."""
        return self.priority(predicted_drop(state.predictor, self.prior), state.load, state.wait)

    def priority(self, drop: Array, load: RowLoad, wait: Array, xp: Any = jnp) -> Any:
        """π with the gains of this law; see the function `priority`.

        Args:
            drop: E[ΔH⁺], nats, `[rows]`.
            load: cost, memory and slack of each row, in [0, 1].
            wait: int32 `[rows]`, steps since the row last advanced.
            xp: namespace of the arrays, `jax.numpy` on the device and `numpy` on the host.
        """
        gains = dict(cost=self.cost, memory=self.memory, slack=self.slack)
        return priority(drop, load, wait, **gains, ageing=self.ageing, bound=self.bound, xp=xp)


@pytree
class PaperScheduling(_SchedulingLaw):
    """The paper's law as printed: π = E[ΔH⁺] / (α C + β M + γ urgency), the highest first.

    Kept for comparison. The paper's claim that no sequence starves is false: a row whose π stays smaller is
    never served, and urgency lowers π. The drop is predicted, and ties are broken, as in `Scheduling`.

    Args:
        width: c ≥ 1, rows that advance in a step; static.
        cost: α ≥ 0, weight of the expected cost.
        memory: β ≥ 0, weight of the KV cache held.
        urgency: γ ≥ 0, weight of 1 − slack.
        prior: AR(1) of the entropy before tokens were observed.

    Source: Kiruluta 2026, arXiv 2603.03310; see `printed_priority`.
    """

    cost: Gain = 0.5
    memory: Gain = 0.25
    urgency: Gain = 0.25
    prior: AR1 = PRIOR

    def score(self, signal: SchedulingSignal, state: ScheduleState) -> jax.Array:
        """See `_SchedulingLaw`: π as printed."""
        gains = dict(cost=self.cost, memory=self.memory, urgency=self.urgency)
        return printed_priority(predicted_drop(state.predictor, self.prior), state.load, **gains)


@pytree
class FirstComeFirstServed(_SchedulingLaw):
    """First come, first served, each sequence to its end: the baseline."""

    def score(self, signal: SchedulingSignal, state: ScheduleState) -> jax.Array:
        """See `_SchedulingLaw`."""
        return -jnp.asarray(state.load.arrival)


@pytree
class ShortestJob(_SchedulingLaw):
    """Shortest remaining job first by the true length (`RowLoad.true_end`), an oracle baseline.

    If all sequences arrive together, no law has a smaller mean completion time.
    """

    def score(self, signal: SchedulingSignal, state: ScheduleState) -> jax.Array:
        """See `_SchedulingLaw`."""
        return -jnp.maximum(state.load.true_end - signal.length, 0)


@pytree
class ShortestRemaining(_SchedulingLaw):
    """Shortest remaining job first by the predicted length (`RowLoad.expected_end`).

    A sequence that exceeds its prediction has 0 tokens left and stays first.
    """

    def score(self, signal: SchedulingSignal, state: ScheduleState) -> jax.Array:
        """See `_SchedulingLaw`."""
        return -jnp.maximum(state.load.expected_end - signal.length, 0)
