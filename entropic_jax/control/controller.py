"""Controller protocol and combinators: a controller reads a `Signal` and rewrites an `Action`.

Temperature, pruning and scheduling laws differ only in the field of `Action` that they write and in how often
they run. Controllers are frozen dataclasses registered as pytrees. Their gains are leaves, so new gains never
retrace, and `vmap` over gains and `grad` with respect to gains work.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..state import Action, SchedulingSignal, Signal
from ..state.pytree import STATIC, pytree
from ..state.row_subset import RowSubset, where_rows
from .temperature_bounds import resolve_upper_bound

AnySignal = Signal | SchedulingSignal


class Controller(Protocol):
    """A control law. All arrays have one entry per row, `[rows, …]`.

    What all rows have in common in the law's state is wrapped in `row_subset.Shared`: a step over some of the
    rows passes it on unchanged in shape. It changes in steps in which the law runs for at least one row.

    `update` runs for every token: after its logits are known and before it is sampled, on the rows of the
    step only. A row's result must not depend on its neighbours. A row that emits nothing keeps its action and
    its entries of the state, whatever `update` returns. `update_rows` runs it: it sees to that, and to T_max.

    A law that compares rows has `schedule` instead, with a `SchedulingSignal`. It runs once per step, after
    sampling, on all rows of the batch, and handles `signal.emitting` itself. A law may have both.

    A law that reads `signal.focus` has an attribute `observes`, an `attention.statistics.Observation`.
    """

    def init(self, action: Action) -> Any:
        """The initial state, a pytree of arrays `[rows, …]` and `Shared` values, for this first action."""

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """The next action and state.

        Args:
            signal: what the step measured.
            action: the action in force.
            state: the controller's state.

        Returns:
            The new action and state, with the same structure, shapes and dtypes.
        """


def update_rows(controller: Any, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
    """Runs a controller's per-token law; rows that emit nothing keep their action and state.

    A law with a field `highest_temperature` sees T_max of every row there, `[rows]`: where the field is 0,
    the temperature that the request asked for.

    Args:
        controller: a `Controller`; without a method `update` it changes nothing here.
        signal: signal of the rows of this step.
        action: their current action.
        state: the controller's state for these rows.

    Returns:
        The next action and state.
    """
    if not hasattr(controller, "update"):
        return action, state
    law = resolve_upper_bound(controller, signal).update
    changed, after = law(signal, action, state)
    return where_rows(signal.emitting, changed, action), where_rows(signal.emitting, after, state)


def schedule_rows(
    controller: Any, signal: SchedulingSignal, action: Action, state: Any
) -> tuple[Action, Any]:
    """Runs a controller's law across rows, once per step.

    Args:
        controller: a `Controller`; without a method `schedule` it changes nothing.
        signal: signal of all rows, after sampling.
        action: their current action.
        state: the controller's state for all rows.
    """
    law = getattr(controller, "schedule", None)
    return (action, state) if law is None else law(signal, action, state)


def take_rows(controller: Any, rows: RowSubset) -> Any:
    """The controller for a subset of the rows, with the gains of those rows in each part that is `PerRow`."""
    per_row = lambda x: hasattr(x, "gather")
    take = lambda x: x.gather(rows) if per_row(x) else x
    return jax.tree.map(take, controller, is_leaf=per_row)


def required_observation(*controllers: Any) -> Any:
    """The attention `Observation` that the controllers need, None if none does.

    Raises:
        ValueError: if two controllers need different observations.
    """
    observations = {o for c in controllers if (o := getattr(c, "observes", None)) is not None}
    if len(observations) > 1:
        raise ValueError(f"observes must be the same for all controllers of a chain; got {observations}")
    return next(iter(observations), None)


@pytree
class Chain:
    """Controllers applied in order; each sees the action written by the one before it."""

    controllers: tuple[Any, ...]

    @property
    def observes(self) -> Any:
        """The attention statistics that any of the controllers needs."""
        return required_observation(*self.controllers)

    def init(self, action: Action) -> tuple[Any, ...]:
        return tuple(controller.init(action) for controller in self.controllers)

    def update(
        self, signal: Signal, action: Action, state: tuple[Any, ...]
    ) -> tuple[Action, tuple[Any, ...]]:
        return self._each(update_rows, signal, action, state)

    def schedule(
        self, signal: SchedulingSignal, action: Action, state: tuple[Any, ...]
    ) -> tuple[Action, tuple[Any, ...]]:
        return self._each(schedule_rows, signal, action, state)

    def _each(
        self,
        run: Callable[..., tuple[Action, Any]],
        signal: AnySignal,
        action: Action,
        state: tuple[Any, ...],
    ) -> tuple[Action, tuple[Any, ...]]:
        states = []
        for controller, controller_state in zip(self.controllers, state, strict=True):
            action, after = run(controller, signal, action, controller_state)
            states.append(after)
        return action, tuple(states)


def chain(*controllers: Any) -> Chain:
    """The controllers in order. `chain()` changes nothing: it is the ablation's baseline."""
    return Chain(controllers)


def _unchanged(new: Any, old: Any) -> bool:
    """Whether two pytrees hold the very same arrays: the law that was asked does nothing here."""
    return all(x is y for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True))


class EveryState(NamedTuple):
    """The counters of `Every`, and the state of the controller inside."""

    tokens: jax.Array  # int32 [rows], tokens that the row has emitted
    steps: jax.Array  # int32 [rows], steps in which a law across rows was run, the same in all rows
    controller: Any  # of the controller inside: any pytree


@pytree
class Every:
    """Runs a controller at every n-th token of a row, the first included; else the action is unchanged.

    Each row counts its own tokens, so that its control does not depend on its neighbours. A law across rows
    runs at every n-th step. `Shared` state of the controller changes in steps in which it runs for any row.
    """

    controller: Any
    n: int

    def __post_init__(self) -> None:
        """Check the period, unless it is traced. Raises ValueError."""
        if isinstance(self.n, int | float) and not (self.n >= 1 and float(self.n).is_integer()):
            raise ValueError(f"n must be an integer of at least 1; got {self.n}")

    @property
    def observes(self) -> Any:
        """The attention statistics that the controller needs."""
        return required_observation(self.controller)

    def init(self, action: Action) -> EveryState:
        tokens = jnp.zeros(action.temperature.shape, jnp.int32)
        return EveryState(tokens, jnp.zeros_like(tokens), self.controller.init(action))

    def update(self, signal: Signal, action: Action, state: EveryState) -> tuple[Action, EveryState]:
        due = state.tokens % self.n == 0
        changed, after = update_rows(self.controller, signal, action, state.controller)
        after = where_rows(due, after, state.controller)
        return where_rows(due, changed, action), state._replace(tokens=state.tokens + 1, controller=after)

    def schedule(
        self, signal: SchedulingSignal, action: Action, state: EveryState
    ) -> tuple[Action, EveryState]:
        due = state.steps % self.n == 0
        changed, after = schedule_rows(self.controller, signal, action, state.controller)
        if _unchanged((changed, after), (action, state.controller)):
            return action, state
        after = where_rows(due, after, state.controller)
        return where_rows(due, changed, action), state._replace(steps=state.steps + 1, controller=after)


@pytree
class When:
    """Runs a controller for those rows only whose `condition(signal, action)` (bool `[rows]`) holds.

    `Shared` state of the controller changes in steps in which the condition holds for any row. The condition
    sees a `Signal` for `Controller.update`, and a `SchedulingSignal` for `Controller.schedule`.
    """

    condition: Annotated[Callable[[Any, Action], jax.Array], STATIC]
    controller: Any

    @property
    def observes(self) -> Any:
        """The attention statistics that the controller needs."""
        return required_observation(self.controller)

    def init(self, action: Action) -> Any:
        return self.controller.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        return self._in_rows(update_rows, signal, action, state)

    def schedule(self, signal: SchedulingSignal, action: Action, state: Any) -> tuple[Action, Any]:
        return self._in_rows(schedule_rows, signal, action, state)

    def _in_rows(
        self, run: Callable[..., tuple[Action, Any]], signal: AnySignal, action: Action, state: Any
    ) -> tuple[Action, Any]:
        changed, after = run(self.controller, signal, action, state)
        if _unchanged((changed, after), (action, state)):
            return action, state
        holds = self.condition(signal, action)
        return where_rows(holds, changed, action), where_rows(holds, after, state)


@pytree
class PerRow:
    """A controller with separate gains for each row: each of its arrays has one entry per row.

    When a step computes a subset of the rows, the loop gathers their gains along with them.
    """

    controller: Any

    @property
    def observes(self) -> Any:
        """The attention statistics that the controller needs."""
        return required_observation(self.controller)

    def gather(self, rows: RowSubset) -> "PerRow":
        """The controller of a subset of the rows."""
        return rows.gather(self)

    def init(self, action: Action) -> Any:
        return self.controller.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        return update_rows(self.controller, signal, action, state)

    def schedule(self, signal: SchedulingSignal, action: Action, state: Any) -> tuple[Action, Any]:
        return schedule_rows(self.controller, signal, action, state)
