"""Entropy estimators for controllers: an estimate from the k largest logits replaces the exact entropy."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from ..entropy import (
    TopKSummary,
    lower_bound,
    midpoint,
    tail_corrected,
    top_k_summary,
    truncated,
    upper_bound,
)
from ..state import Action, SchedulingSignal, Signal
from ..state.pytree import STATIC, pytree
from .controller import schedule_rows, update_rows

# Estimators of H₁ from the k most probable tokens, in nats: the entropy of these alone (`truncated`), the
# paper's tail-corrected form (`printed`), and the tight bounds with their midpoint, see `entropy`.
ESTIMATORS: dict[str, Callable[[TopKSummary], jax.Array]] = {
    "truncated": truncated,
    "printed": tail_corrected,
    "lower": lower_bound,
    "midpoint": lambda summary: midpoint(summary).entropy,
    "upper": upper_bound,
}


class EstimatedState(NamedTuple):
    """The latest estimates, and the state of the controller inside."""

    entropy: jax.Array  # float32 [rows], nats
    controller: Any  # of the controller inside: any pytree


@pytree
class Estimated:
    """Runs a controller on an estimate of H₁ from the k largest logits instead of the exact entropy.

    The loop's own entropy, and what it traces, stay exact.

    Args:
        controller: the controller that reads the estimate as `signal.entropy`.
        estimator: a name of `ESTIMATORS`; static.
        k: logits used, in [1, vocabulary]; static.
        belief_temperature: T_cal > 0, the same as in the loop's state.

    Raises:
        ValueError: by `init`, for an unknown estimator.

    Source: Kiruluta 2026 (arXiv 2603.03310), which estimates from the top-k tokens throughout. Differs from
    the paper: exact entropy is the default, since the mass of the top k needs the full log-sum-exp anyway.

    >>> import jax.numpy as jnp
    >>> from entropic_jax.control.pruning import Pruning
    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> law = Estimated(Pruning(low_entropy=1.0, high_entropy=3.0, patience=0, rate=1.0), "truncated", 2)
    >>> signal, action = quiet_signal(1), plain_action(jnp.ones(1))
    >>> signal = signal._replace(logits=jnp.zeros((1, 64)), emitting=jnp.ones(1, bool))
    >>> changed, _ = law.update(signal, action, law.init(action))
    >>> float(changed.dropped_mass_limit[0])  # the entropy of a uniform pair is ln 2
    0.10000000149011612
    """

    controller: Any
    estimator: Annotated[str, STATIC] = "upper"
    k: Annotated[int, STATIC] = 50
    belief_temperature: Any = 1.0

    def init(self, action: Action) -> Any:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}; got {self.estimator!r}")
        return EstimatedState(jnp.zeros_like(action.temperature), self.controller.init(action))

    def update(self, signal: Signal, action: Action, state: EstimatedState) -> tuple[Action, EstimatedState]:
        if signal.logits is None:
            raise ValueError("signal.logits must be the logits of the step, [rows, vocabulary]; got None")
        summary = top_k_summary(signal.logits / self.belief_temperature, self.k)
        entropy = ESTIMATORS[self.estimator](summary)
        action, inner = update_rows(
            self.controller, signal._replace(entropy=entropy), action, state.controller
        )
        return action, EstimatedState(entropy, inner)

    def schedule(
        self, signal: SchedulingSignal, action: Action, state: EstimatedState
    ) -> tuple[Action, EstimatedState]:
        estimated = signal._replace(entropy=state.entropy)
        action, inner = schedule_rows(self.controller, estimated, action, state.controller)
        return action, state._replace(controller=inner)
