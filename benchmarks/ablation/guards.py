"""Guards of page pruning, one at a time on the same pages, under scaled logits and a biased entropy."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from entropic_jax import chain
from entropic_jax.analysis import ablation
from entropic_jax.analysis.studies import Row, Workload
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control.controller import update_rows
from entropic_jax.control.pruning import Pruning
from entropic_jax.methods.presets import FINE_PAGES, pruning_law
from entropic_jax.state.pytree import pytree

from .stress import LOWEST_PART, SCALES, SCORED, scaled

BIASES = (-1.0, 1.0)  # nats
LARGE_LIMIT = 0.3  # ε_max at which pruning costs something, so that a guard has something to save
BASE = "ε by H₁"


@pytree
class Biased:
    """A controller that receives an entropy with a constant error of `bias` nats."""

    controller: Any
    bias: Any

    def init(self, action: Any) -> Any:
        return self.controller.init(action)

    def update(self, signal: Any, action: Any, state: Any) -> tuple[Any, Any]:
        wrong = signal._replace(entropy=signal.entropy + self.bias)
        return update_rows(self.controller, wrong, action, state)


class Arm(NamedTuple):
    """One configuration of pruning, which differs from `BASE` in one thing."""

    law: Pruning
    pages: Selection
    belief_temperature: float


def arms(law: Pruning, belief_temperature: float, scale: float) -> dict[str, Arm]:
    """The arms by name: `BASE`, arms that differ from it in one guard, and one without the guards of ε.

    Args:
        law: the pruning law with every guard, whose ε follows H₁.
        belief_temperature: T_cal of the model.
        scale: factor of the logits.
    """

    def altered(**gains: float) -> Arm:
        return Arm(dataclasses.replace(law, **gains), FINE_PAGES, belief_temperature)

    def on_pages(**rules: int) -> Arm:
        pages = dataclasses.replace(FINE_PAGES, rules=FINE_PAGES.rules._replace(**rules))
        return Arm(law, pages, belief_temperature)

    bare = {"patience": 0, "rate": 1.0, "smoothing": 1.0}
    return {
        BASE: altered(),
        "H_min 0.5": altered(entropy_floor=0.5),
        "ε_H 0.5": altered(entropy_error=0.5),
        "ε_H 1": altered(entropy_error=1.0),
        "T_cal 1": altered()._replace(belief_temperature=1.0),
        "T_cal of the scaled logits": altered()._replace(belief_temperature=scale * belief_temperature),
        "patience 0": altered(patience=0),
        "rate 1": altered(rate=1.0),
        "smoothing 1": altered(smoothing=1.0),
        "no guard of ε": altered(**bare),
        "recent pages 1": on_pages(recent_pages=1),
        "sink pages 0": on_pages(sink_pages=0),
        "B_min 0": on_pages(min_pages=0),
    }


def guards(workload: Workload, context: int, seed: int, quick: bool) -> list[Row]:
    """Quality against dense attention and kept fraction of every arm, by scale, bias and ε_max."""
    texts = workload.windows(2 if quick else 4, context, 300 + seed)
    tails = [t[-SCORED:] for t in texts]
    limits = {
        limit: workload.gains.replace(dropped_mass_limit=limit, lowest_dropped_mass_limit=LOWEST_PART * limit)
        for limit in (*(() if quick else (workload.gains.dropped_mass_limit,)), LARGE_LIMIT)
    }
    rows = []
    for scale in SCALES[1:3] if quick else SCALES:
        subject = scaled(workload, scale)
        state = ablation.prefill(subject, [t[:-SCORED] for t in texts], SCORED + 1)

        def score(
            arm: Arm | None, bias: float, belief: float, subject=subject, state=state
        ) -> ablation.Forced:
            law = chain(Biased(arm.law, bias)) if arm else chain()
            resumed = ablation.resume(state, law, arm.pages if arm else None)
            resumed = resumed._replace(belief_temperature=jnp.float32(belief))
            return ablation.forced(subject, law, resumed, tails)

        # The surprisal is that of softmax(z / T_cal), so each T_cal has a dense run of its own.
        dense: dict[float, float] = {}
        for bias in (0.0, *BIASES) if scale == 1.0 and not quick else (0.0,):
            for limit, gains in limits.items():
                for name, arm in arms(pruning_law(gains), subject.belief_temperature, scale).items():
                    belief = arm.belief_temperature
                    if belief not in dense:
                        dense[belief] = workload.bits_per_byte(score(None, 0.0, belief).surprisal)
                    outcome = score(arm, bias, belief)
                    rows.append(
                        {
                            "arm": name,
                            "scale": scale,
                            "bias": bias,
                            "limit": limit,
                            "seed": seed,
                            "dense": dense[belief],
                            "bits_per_byte": workload.bits_per_byte(outcome.surprisal),
                            "kept": float(outcome.kept[:, 1:].mean()),
                            "unsteady": float(np.abs(np.diff(outcome.dropped_mass_limit, axis=1)).mean()),
                        }
                    )
    return rows
