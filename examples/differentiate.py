"""Tune a controller by gradient: the loop is differentiable in its gains.

python examples/differentiate.py

Held-out text is replayed under soft page selection (every page is read, and weighed by a gate), and optax
moves the gains of the pruning law to lower bits per byte plus a price per byte that is read. The gradient
passes through the law, the gates, attention and the entropies that the law sees next.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import entropic_jax as ej
from entropic_jax import models
from entropic_jax.attention.page_selection import Selection
from entropic_jax.control.pruning import Pruning

PRICE = 0.5  # nats per token for reading everything
SCORED, CONTEXT, STEPS = 24, 768, 12


def main() -> list[float]:
    model = models.load()
    spec = importlib.util.find_spec("rich.table")
    assert model.tokenizer is not None and spec is not None and spec.origin is not None
    tokens = model.tokenizer.encode(Path(spec.origin).read_text())[:CONTEXT]
    pool = ej.allocate(model.decoder.shape, 1, CONTEXT, page_size=32)
    soft = Selection(softness=0.5)
    gains = {
        "dropped_mass_limit": jnp.float32(0.05),
        "low_entropy": jnp.float32(0.3),
        "high_entropy": jnp.float32(1.0),
    }
    law = lambda g: Pruning(**g, patience=0, rate=1.0)
    state = ej.start(
        model.decoder,
        model.params,
        law(gains),
        pool,
        [tokens[:-SCORED]],
        key=jax.random.key(0),
        max_tokens=SCORED + 1,
        page_policy=soft,
    )
    tail = jnp.asarray([tokens[-SCORED:]], jnp.int32)

    @jax.jit
    @jax.value_and_grad
    def loss(gains):
        _, trace = ej.replay(model.decoder, model.params, law(gains), state, tail)
        return trace.surprisal.mean() + PRICE * trace.kept_fraction.mean()

    rule = optax.adam(0.05)
    memory, losses = rule.init(gains), []
    for step in range(STEPS):
        value, gradient = loss(gains)
        losses.append(float(value))
        updates, memory = rule.update(gradient, memory, gains)
        moved: Any = optax.apply_updates(gains, updates)
        gains = dict(moved)
        gains["dropped_mass_limit"] = jnp.clip(gains["dropped_mass_limit"], 0.0, 0.9)
        shown = ", ".join(f"{k} {float(v):.3f}" for k, v in gains.items())
        print(f"step {step:2d}: loss {value:.4f} nats; {shown}")
    assert np.isfinite(losses).all()
    return losses


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
