"""Number of experts that a step reads in each layer of a mixture, decided by the policy of the state."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..state import Measured, State


class ExpertPolicy(Protocol):
    """Decides how many experts each row reads, layer by layer; a pytree, as `State.expert_policy`."""

    def num_experts(
        self, probability: jax.Array, layer: int, signal: Measured, length: jax.Array
    ) -> jax.Array:
        """The number of experts that each row reads in a layer, int32 `[rows]`; 0 counts as 1.

        Args:
            probability: the probabilities of the router for all experts, float32 `[rows, experts]`.
            layer: the number of the layer among those with experts.
            signal: the measurements of the token before. Those of the token to come need the experts first.
            length: int32 `[rows]`, positions in the cache.
        """


class ExpertsRead(NamedTuple):
    """The experts that a step read."""

    counts: jax.Array  # int32 [rows, layers that have experts]
    fraction: jax.Array  # float32 [rows], of the experts that the router chooses


class ExpertReader:
    """Asks the policy in each layer of a step of one token per row, and counts what is read.

    Args:
        policy: an `ExpertPolicy`.
        state: the state of the rows of the step.
    """

    def __init__(self, policy: Any, state: State) -> None:
        self.policy, self.measured, self.length = policy, state.measured, state.length
        self._counts: list[jax.Array] = []
        self._most = 0

    def __call__(self, probability: jax.Array, most: int) -> jax.Array:
        """The number of experts that each row reads in the next layer, int32 `[rows]`, from 1 to `most`."""
        number = self.policy.num_experts(probability, len(self._counts), self.measured, self.length)
        count = jnp.clip(jnp.asarray(number, jnp.int32), 1, most)
        self._counts.append(count)
        self._most += most
        return count

    def total(self) -> ExpertsRead:
        """Totals of the step so far."""
        counts = jnp.stack(self._counts, axis=-1)
        return ExpertsRead(counts, counts.sum(-1).astype(jnp.float32) / self._most)
