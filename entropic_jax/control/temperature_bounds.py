"""Bounds of the temperature: the request's own temperature as T_max, and the clip in which laws end.

`update_rows` resolves T_max before a law runs, so a law may clip to its `highest_temperature` as it is.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..entropy import LOWEST_TEMPERATURE
from ..state import Action, Signal
from ..state.pytree import Gain

FIELD = "highest_temperature"


def upper_bound(highest_temperature: Gain, signal: Signal) -> jax.Array:
    """T_max of every row: `highest_temperature`, or the requested temperature where that is 0.

    >>> from entropic_jax.state import quiet_signal
    >>> signal = quiet_signal(2)._replace(requested_temperature=jnp.array([0.7, 1.0]))
    >>> [round(x, 3) for x in upper_bound(0.0, signal).tolist()], upper_bound(1.25, signal).tolist()
    ([0.7, 1.0], [1.25, 1.25])
    """
    highest = jnp.asarray(highest_temperature, jnp.float32)
    requested = signal.requested_temperature
    requested = jnp.where(requested > 0, requested, 1.0)  # a greedy row, whose temperature is never set
    return jnp.where(highest > 0, highest, requested)


def resolve_upper_bound(law: Any, signal: Signal) -> Any:
    """The law with T_max of every row as its `highest_temperature`; a law without that field as it is.

    Args:
        law: a control law.
        signal: signal of the rows of this step.

    >>> from entropic_jax.control.temperature import Integral
    >>> from entropic_jax.state import quiet_signal
    >>> resolve_upper_bound(Integral(target_entropy=1.0), quiet_signal(2)).highest_temperature.tolist()
    [1.0, 1.0]
    """
    if not dataclasses.is_dataclass(law) or FIELD not in {field.name for field in dataclasses.fields(law)}:
        return law
    return dataclasses.replace(law, **{FIELD: upper_bound(getattr(law, FIELD), signal)})  # type: ignore[type-var]


def finite_or_zero(x: jax.Array) -> jax.Array:
    """The array with 0 for what is not finite, so that a failed measurement spoils no value and no gradient.

    >>> finite_or_zero(jnp.array([1.0, jnp.nan, jnp.inf])).tolist()
    [1.0, 0.0, 0.0]
    """
    return jnp.where(jnp.isfinite(x), x, 0.0)


def set_temperature(
    action: Action, temperature: jax.Array, lowest_temperature: Gain, highest_temperature: Gain
) -> Action:
    """The action with the clipped temperature; greedy rows and non-finite temperatures change nothing.

    Args:
        action: the action in force.
        temperature: T before the clip, `[rows]`.
        lowest_temperature: T_min; at 0, T still stays above 0, since 0 would make the row greedy for good.
        highest_temperature: T_max > 0, which also applies where T_min is above it.
    """
    usable = (action.temperature > 0) & jnp.isfinite(temperature)
    bounded = jnp.clip(jnp.where(usable, temperature, 1.0), lowest_temperature, highest_temperature)
    bounded = jnp.maximum(bounded, LOWEST_TEMPERATURE)
    return action._replace(temperature=jnp.where(usable, bounded, action.temperature))
