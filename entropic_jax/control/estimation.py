"""Which entropy a controller sees: the exact one, or what the largest logits say of it."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax

from ..entropy import Head, head, lower_bound, midpoint, tail_corrected, truncated, upper_bound
from ..state import Action, Signal
from .controller import STATIC, advance, pytree

ESTIMATORS: dict[str, Callable[[Head], jax.Array]] = {
    "truncated": truncated,
    "printed": tail_corrected,
    "lower": lower_bound,
    "midpoint": lambda seen: midpoint(seen).entropy,
    "upper": upper_bound,
}


@pytree
class Estimated:
    """Run a controller on an estimate of H₁ from the k largest logits, in place of the exact entropy.

    `estimator` is a name of `ESTIMATORS`: `truncated` H̃ of the head alone, `printed` the paper's
    tail-corrected form, `upper` the tight form of it, `lower` and `midpoint` of the tight bounds. Nats.
    belief_temperature T_cal > 0, as that of the state. The loop's own entropy, and what it traces, stay
    exact. Raises ValueError for a name that is not known.

    Source: Kiruluta 2026 (arXiv 2603.03310), which estimates from the head throughout. Differs from the
    paper: exact is the default, as the mass of the head needs the whole log-sum-exp anyway.

    >>> import jax.numpy as jnp
    >>> from entropic_jax.control.pruning import Pruning
    >>> from entropic_jax.state import plain_action, quiet_signal
    >>> law = Estimated(Pruning(low_entropy=1.0, high_entropy=3.0, patience=0, rate=1.0), "truncated", 2)
    >>> signal, action = quiet_signal(1), plain_action(jnp.ones(1))
    >>> seen = signal._replace(logits=jnp.zeros((1, 64)), emitting=jnp.ones(1, bool))
    >>> changed, _ = law.update(seen, action, law.init(action))
    >>> float(changed.dropped_mass_limit[0])  # the entropy of a uniform pair is ln 2
    0.10000000149011612
    """

    controller: Any
    estimator: Annotated[str, STATIC] = "upper"
    k: Annotated[int, STATIC] = 50
    belief_temperature: Any = 1.0
    across_rows: ClassVar[bool] = True

    def init(self, action: Action) -> Any:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator is {self.estimator!r}; accepted are {', '.join(ESTIMATORS)}")
        return self.controller.init(action)

    def update(self, signal: Signal, action: Action, state: Any) -> tuple[Action, Any]:
        if signal.logits is None:
            raise ValueError("signal.logits is None; accepted are the logits of the step, [rows, vocabulary]")
        seen = head(signal.logits / self.belief_temperature, self.k)
        estimated = signal._replace(entropy=ESTIMATORS[self.estimator](seen))
        return advance(self.controller, estimated, action, state)
