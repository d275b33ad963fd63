"""The one abstraction of the loop: a controller reads what was measured and rewrites what is obeyed.

Temperature, pruning and scheduling differ only in the field of `Action` they write and in how often they
run. Controllers are frozen dataclasses that are pytrees: their gains are leaves, so new gains never
retrace, and `vmap` over gains and `grad` with respect to gains work.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

from ..state import Action, Signal

T = TypeVar("T")
STATIC = "static"  # marks a field of a `pytree` class that is no leaf


class Controller(Protocol):
    """A control law. All arrays have one entry per row.

    It runs after the logits of a step are known and before the step samples. A row that emits nothing keeps
    its action, and its entries of the state, whatever `update` returns; a law that looks across rows says so
    with a class attribute `across_rows = True` and is left to handle `signal.emitting` itself. A law that
    needs `signal.focus` has an attribute `observes`, a static `observation.Observation`.
    """

    def init(self, action: Action) -> Any:
        """The controller's own state, a pytree, for a batch that starts with `action`."""

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """The next action and state. Structure, shapes and dtypes stay what they were."""


def advance(controller: Controller, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
    """`controller.update`, held in the rows that emit nothing unless the law looks across rows."""
    changed, after = controller.update(signal, action, state)
    if getattr(controller, "across_rows", False):
        return changed, after
    by_row = lambda new, old: keep_rows(signal.emitting, new, old)
    return jax.tree.map(by_row, changed, action), jax.tree.map(by_row, after, state)


def observed(*controllers: Any) -> Any:
    """What the controllers ask to be observed, None where none does; ValueError where they disagree."""
    asked = {found for c in controllers if (found := getattr(c, "observes", None)) is not None}
    if len(asked) > 1:
        raise ValueError(f"observes is {asked}; accepted is one for all controllers of a chain")
    return next(iter(asked), None)


def keep_rows(flag: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """`new` in the flagged rows and `old` elsewhere; what has no row axis is shared, and new."""
    new, old = jnp.asarray(new), jnp.asarray(old)
    if new.ndim == 0 or new.shape[0] != flag.shape[0]:
        return new
    return jnp.where(flag.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose fields are pytree leaves.

    Fields annotated `Annotated[…, STATIC]` are part of the structure instead: changing one retraces.

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

    # Not by jax.tree_util.register_dataclass: of its classes, any two with as many fields have structures
    # that compare equal, and a jitted function may then run the law that was compiled for the other.
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
    """Controllers applied in order; the later one sees the action of the earlier."""

    controllers: tuple[Any, ...]
    across_rows: ClassVar[bool] = True

    @property
    def observes(self) -> Any:
        return observed(*self.controllers)

    def init(self, action: Action) -> tuple[Any, ...]:
        return tuple(c.init(action) for c in self.controllers)

    def update(
        self, signal: Signal, action: Action, state: tuple[Any, ...]
    ) -> tuple[Action, tuple[Any, ...]]:
        after = []
        for controller, own in zip(self.controllers, state, strict=True):
            action, own = advance(controller, signal, action, own)
            after.append(own)
        return action, tuple(after)


def chain(*controllers: Controller) -> Chain:
    """The controllers in order. `chain()` changes nothing: it is the ablation's baseline."""
    return Chain(controllers)


def _choose(flag: jax.Array, new: Any, old: Any) -> Any:
    """`new` where the flag (scalar or `[rows]`) is set, for every leaf."""

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
        return observed(self.controller)

    def init(self, action: Action) -> tuple[jax.Array, Any]:
        return jnp.int32(0), self.controller.init(action)

    def update(self, signal: Signal, action: Action, state: tuple[jax.Array, Any]) -> tuple[Action, Any]:
        count, own = state
        due = count % self.n == 0
        changed, after = advance(self.controller, signal, action, own)
        return _choose(due, changed, action), (count + 1, _choose(due, after, own))


@pytree
class When:
    """Run a controller for those rows only whose `condition(signal, action)` (bool `[rows]`) holds.

    State leaves of the controller must have one entry per row.
    """

    condition: Annotated[Callable[[Signal, Action], jax.Array], STATIC]
    controller: Any
    across_rows: ClassVar[bool] = True

    @property
    def observes(self) -> Any:
        return observed(self.controller)

    def init(self, action: Action) -> Any:
        return self.controller.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        chosen = self.condition(signal, action)
        changed, after = advance(self.controller, signal, action, state)
        return _choose(chosen, changed, action), _choose(chosen, after, state)
