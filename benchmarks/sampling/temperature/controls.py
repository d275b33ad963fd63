"""Controls of a temperature law: the same law with its decisions exchanged between rows, or one token late.

A result that survives either does not come from the entropy of the token at hand.
"""

from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax.control import pytree, update_rows
from entropic_jax.state import Action, Signal


@pytree
class Shuffled:
    """Gives every row the temperature and the surprisal limit that a law decided for another row.

    Args:
        law: a temperature law.
        seed: the seed of the permutations, one for each step.
    """

    law: Any
    seed: Any = 0

    def init(self, action: Action) -> Any:
        """The law's state, and the number of steps so far in each row."""
        return self.law.init(action), jnp.zeros(action.temperature.shape, jnp.int32)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`."""
        inner, steps = state
        decided, inner = update_rows(self.law, signal, action, inner)
        key = jax.random.fold_in(jax.random.key(jnp.int32(self.seed)), steps[0])
        order = jax.random.permutation(key, steps.shape[0])
        return exchanged(action, decided, order), (inner, steps + 1)


@pytree
class Delayed:
    """Gives every token the temperature and the surprisal limit that a law decided for the token before.

    Args:
        law: a temperature law.
    """

    law: Any

    def init(self, action: Action) -> Any:
        """The law's state, and what it decided last."""
        return self.law.init(action), (action.temperature, action.surprisal_limit)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`."""
        inner, (temperature, limit) = state
        decided, inner = update_rows(self.law, signal, action, inner)
        late = action._replace(temperature=temperature, surprisal_limit=limit)
        return late, (inner, (decided.temperature, decided.surprisal_limit))


@pytree
class Constant:
    """Gives every token the same temperature and the same surprisal limit.

    Args:
        temperature: T > 0.
        surprisal_limit: nats.
    """

    temperature: Any
    surprisal_limit: Any

    def init(self, action: Action) -> tuple[()]:
        """No state."""
        return ()

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        """See `Controller`."""
        fill = lambda value: jnp.full_like(action.temperature, value)
        return action._replace(
            temperature=fill(self.temperature), surprisal_limit=fill(self.surprisal_limit)
        ), state


def exchanged(action: Action, decided: Action, order: jax.Array) -> Action:
    """The action with the temperature and the limit of row `order[i]` in row i.

    Args:
        action: in force.
        decided: by the law.
        order: a permutation, int32 `[rows]`.
    """
    return action._replace(
        temperature=decided.temperature[order], surprisal_limit=decided.surprisal_limit[order]
    )
