"""Controller protocol and combinators: a controller reads a `Signal` and rewrites an `Action`.

Temperature, pruning and scheduling laws differ only in the field of `Action` that they write and in how often
they run. Controllers are frozen dataclasses registered as pytrees. Their gains are leaves, so new gains never
retrace, and `vmap` over gains and `grad` with respect to gains work.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from ..state import Action, Signal

T = TypeVar("T")
STATIC = "static"  # marks a field of a `pytree` class that is part of the structure, not a leaf


class Controller(Protocol):
    """A control law. All arrays have one entry per row.

    A controller runs after the logits of a step are computed and before the step samples. For rows that emit
    no token, the action and the row's entries of the state are kept, whatever `update` returns. A law that
    looks across rows declares a class attribute `across_rows = True` and handles `signal.emitting` itself. A
    law that needs `signal.focus` has an attribute `observes`, a static `attention.statistics.Observation`.
    """

    def init(self, action: Action) -> Any:
        """The initial state of the controller, a pytree, for a batch that starts with `action`."""

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """The next action and state.

        Args:
            signal: what the step measured.
            action: the action in force.
            state: the controller's state.

        Returns:
            The new action and state, with the same structure, shapes and dtypes.
        """


def update_rows(controller: Controller, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
    """Runs `controller.update` and keeps the action and state of rows that emit nothing.

    Args:
        controller: the law; one with `across_rows` decides itself what happens to rows that emit nothing.
        signal: what the step measured.
        action: the action in force.
        state: the controller's state.

    Returns:
        The new action and state.
    """
    new_action, new_state = controller.update(signal, action, state)
    if getattr(controller, "across_rows", False):
        return new_action, new_state

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        return keep_rows(signal.emitting, new, old)

    return jax.tree.map(keep, new_action, action), jax.tree.map(keep, new_state, state)


def required_observation(*controllers: Any) -> Any:
    """The attention `Observation` that the controllers need, None if none does.

    Raises:
        ValueError: if two controllers need different observations.
    """
    observations = {o for c in controllers if (o := getattr(c, "observes", None)) is not None}
    if len(observations) > 1:
        raise ValueError(f"observes must be the same for all controllers of a chain; got {observations}")
    return next(iter(observations), None)


def keep_rows(flag: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` in the flagged rows, bool `[rows]`, else `old`; arrays without a row axis are `new`."""
    new, old = jnp.asarray(new), jnp.asarray(old)
    if new.ndim == 0 or new.shape[0] != flag.shape[0]:
        return new
    return jnp.where(flag.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass whose fields are pytree leaves.

    Fields annotated `Annotated[…, STATIC]` are part of the pytree structure: changing one retraces.

    >>> @pytree
    ... class Gain:
    ...     value: float
    >>> jax.tree.leaves(Gain(0.5))
    [0.5]
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    static = [f.name for f in fields if STATIC in getattr(f.type, "__metadata__", ())]
    leaves = [f.name for f in fields if f.name not in static]

    # jax.tree_util.register_dataclass does not serve: any two of its classes with the same number of fields
    # compare as equal structures, so a jitted function could run the law compiled for another class.
    def flatten(controller: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        pairs = [(jax.tree_util.GetAttrKey(name), getattr(controller, name)) for name in leaves]
        return pairs, tuple(getattr(controller, name) for name in static)

    def unflatten(values: tuple[Any, ...], children: Any) -> Any:
        named = dict(zip(leaves, children, strict=True))
        return cls(**named, **dict(zip(static, values, strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


@pytree
class Chain:
    """Controllers applied in order; each sees the action written by the one before it."""

    controllers: tuple[Any, ...]
    across_rows: ClassVar[bool] = True

    @property
    def observes(self) -> Any:
        return required_observation(*self.controllers)

    def init(self, action: Action) -> tuple[Any, ...]:
        return tuple(c.init(action) for c in self.controllers)

    def update(
        self, signal: Signal, action: Action, state: tuple[Any, ...]
    ) -> tuple[Action, tuple[Any, ...]]:
        new_states = []
        for controller, controller_state in zip(self.controllers, state, strict=True):
            action, controller_state = update_rows(controller, signal, action, controller_state)
            new_states.append(controller_state)
        return action, tuple(new_states)


def chain(*controllers: Controller) -> Chain:
    """Applies controllers in order. `chain()` changes nothing: it is the baseline of ablations."""
    return Chain(controllers)


def _select(flag: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the flag (bool, scalar or `[rows]`) is set, else `old`, for every leaf."""

    def leaf(x, y):
        x, y = jnp.asarray(x), jnp.asarray(y)
        return jnp.where(flag.reshape(flag.shape + (1,) * (x.ndim - flag.ndim)), x, y)

    return jax.tree.map(leaf, new, old)


@pytree
class Every:
    """Run a controller at every n-th step only, the first included; between, the action stands."""

    controller: Any
    n: int
    across_rows: ClassVar[bool] = True

    @property
    def observes(self) -> Any:
        return required_observation(self.controller)

    def init(self, action: Action) -> tuple[jax.Array, Any]:
        return jnp.int32(0), self.controller.init(action)

    def update(self, signal: Signal, action: Action, state: tuple[jax.Array, Any]) -> tuple[Action, Any]:
        count, own = state
        due = count % self.n == 0
        changed, after = update_rows(self.controller, signal, action, own)
        return _select(due, changed, action), (count + 1, _select(due, after, own))


@pytree
class When:
    """Runs a controller only in the rows where a condition holds.

    Args:
        condition: maps (signal, action) to bool `[rows]`; static.
        controller: the controller to run. Its state leaves must have one entry per row.
    """

    condition: Annotated[Callable[[Signal, Action], jax.Array], STATIC]
    controller: Any
    across_rows: ClassVar[bool] = True

    @property
    def observes(self) -> Any:
        return required_observation(self.controller)

    def init(self, action: Action) -> Any:
        return self.controller.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        selected = self.condition(signal, action)
        new_action, new_state = update_rows(self.controller, signal, action, state)
        return _select(selected, new_action, action), _select(selected, new_state, state)
