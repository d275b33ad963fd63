"""A control law of one's own, in ten lines: hold the entropy of what is sampled at a set-point.

python examples/custom_controller.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import entropic_jax as ej
from entropic_jax import models
from entropic_jax.control import pytree
from entropic_jax.control.temperature_bounds import set_temperature


@pytree
class HoldEntropy:
    """ln T ← ln T − rate · (H_T − target), within [0.2, 2]."""

    target: float  # nats
    rate: float

    def init(self, action):
        return ()

    def update(self, signal, action, state):
        factor = jnp.exp(-self.rate * (signal.tempered_entropy - self.target))
        return set_temperature(action, action.temperature * factor, 0.2, 2.0), state


def main() -> None:
    model = models.load()
    assert model.tokenizer is not None
    decoder, prompt = model.decoder, model.tokenizer.encode("import os\n\n\ndef ")
    for controller in (ej.chain(), HoldEntropy(0.5, 0.1), HoldEntropy(2.0, 0.1)):
        pool = ej.allocate(decoder.shape, rows=4, context=256)
        state = ej.start(
            decoder, model.params, controller, pool, [prompt] * 4, key=jax.random.key(0), max_tokens=128
        )
        _, trace = ej.generate(decoder, model.params, controller, state, 128, capacity=128)
        emitted = np.asarray(trace.emitted)

        def mean(field):
            return np.asarray(getattr(trace, field))[emitted].mean()

        print(f"{controller}: entropy {mean('tempered_entropy'):.2f} nats at T = {mean('temperature'):.2f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
