"""Entropix as released, for comparison: its constants, in its units, with its defects.

Use `entropix` instead, which implements what the published sampler describes. The release differs from its
description:

* Attention statistics cover the entire zero-padded cache, before the mask. The entropies are those of a
  nearly uniform distribution, about 12 bits for 4096 positions, whatever the text.
* "Agreement" is the mean distance of the heads from their mean, which is disagreement, and close to 0.
* Min-p has no effect: the masked logits are not the ones that are sampled from.
* Top-p accumulates probabilities in ascending order. If the other tokens hold enough mass, it removes the
  most probable one.
* The random key is the same at every step, so that the noise of each place among the top-k never changes.
* One decision, from statistics averaged over the batch, applies to all rows.
* All candidates get the same bonus on their log-probability, so that the most probable one drawn wins.
* There is no branching and no resampling; the clarification is a single token.

Source: xjdr-alt/entropix (2024), `entropix/sampler.py`. Differs from the source: the noise of a row and place
is drawn once for 100 places instead of for each top-k, so that the tokens have the same distribution but are
not identical; greedy rows, which the release does not have, are not changed. In some versions of the release
the pause requires more than 5 bits (`unsure_entropy`).
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import entropy
from ..attention.statistics import Observation
from ..state import Action, Signal
from ..state.pytree import STATIC, pytree
from .entropix import (
    ADAPT,
    CLARIFY,
    EXPLORE,
    FLOW,
    RESAMPLE,
    Constants,
    QuadrantFeatures,
    SamplerSettings,
    Thresholds,
    quadrant,
    quadrant_settings,
    step_inputs,
)

LN2 = float(np.log(2))
BITS = Thresholds(0.1, 3.0, 5.0, 0.1, 5.0)
CONTEXT = 4096  # of the cache that the release allocates
MOST = 100  # candidates of top-k
KEY = 1337


class Last(NamedTuple):
    """The previous step of each row; each `[rows]`."""

    token: jax.Array  # int32, emitted last, −1 before the first
    quadrant: jax.Array  # int32


def _released_features(signal: Signal, logits: jax.Array, together: bool = True) -> QuadrantFeatures:
    """Features in bits, bits² and the scores' own unit; with `together`, means over the rows that emit."""
    if signal.focus is None:
        raise ValueError("signal must come from a step whose controller observes attention; got no focus")
    plain, focus = entropy.entropy_statistics(logits), signal.focus
    each = QuadrantFeatures(
        plain.entropy / LN2,
        plain.varentropy / LN2**2,
        focus.entropy / LN2,
        focus.varentropy / LN2**2,
        focus.agreement,
        focus.interaction,
    )
    if not together:
        return each
    num_emitting = jnp.maximum(signal.emitting.sum(), 1).astype(jnp.float32)

    def batch_mean(x):
        return jnp.broadcast_to(jnp.where(signal.emitting, x, 0.0).sum() / num_emitting, x.shape)

    return jax.tree.map(batch_mean, each)


def clipped(quadrants: jax.Array, settings: SamplerSettings) -> SamplerSettings:
    """The quadrants' settings, clipped as in the release."""
    temperature = jnp.select(
        [(quadrants == CLARIFY) | (quadrants == EXPLORE), quadrants == RESAMPLE],
        [jnp.minimum(settings.temperature, 1.5), jnp.maximum(settings.temperature, 2.0)],
        settings.temperature,
    )
    top_k = jnp.where(quadrants == EXPLORE, jnp.maximum(settings.top_k, 5.0), settings.top_k)
    low = jnp.where(quadrants == RESAMPLE, jnp.maximum(settings.top_p, 0.5), settings.top_p)
    return SamplerSettings(temperature, low, jnp.clip(top_k, 1.0, MOST), settings.min_p)


def shares(logits: jax.Array, settings: SamplerSettings) -> tuple[jax.Array, jax.Array]:
    """The 100 most probable tokens, `[rows, 100]`, and the probabilities at which the release draws them."""
    probability = jax.nn.softmax(logits / settings.temperature[:, None], -1)
    most = min(MOST, logits.shape[-1])
    share, token = jax.lax.top_k(probability, most)
    share = jnp.where(jnp.arange(most) < settings.top_k[:, None].astype(jnp.int32), share, 0.0)
    below = jnp.flip(jnp.cumsum(jnp.flip(share, -1), -1), -1) - share  # of the less likely ones
    share = jnp.where(below > settings.top_p[:, None], 0.0, share)
    return token, share / share.sum(-1, keepdims=True)


def drawn(share: jax.Array, count: int, together: bool = True) -> jax.Array:
    """Draws places in the list, int32 `[rows, count]`, by noise that is the same at every step.

    Args:
        share: float32 `[rows, n]`, probabilities.
        count: how many draws per row.
        together: whether every row of the batch has noise of its own; else all have that of a batch of one.
    """
    shape = share.shape if together else (1, share.shape[1])
    keys = jax.random.split(jax.random.key(KEY), count)
    noise = jax.vmap(lambda key: jax.random.exponential(key, shape))(keys)
    return jnp.argmax(share / noise, -1).T


@pytree
class AsReleased:
    """The sampler of the release. `pause` is its clarification token (2564 of Llama 3), or −1 for none.

    Without `together`, every row decides as a batch of one. The temperature of a request only says whether
    its row is greedy.
    """

    thresholds: Thresholds = BITS
    constants: Constants = Constants()
    pause: Annotated[int, STATIC] = -1
    candidates: Annotated[int, STATIC] = 5
    together: Annotated[bool, STATIC] = True
    observes: Annotated[Observation, STATIC] = Observation(padded=CONTEXT)

    def init(self, action: Action) -> Last:
        none = jnp.zeros(action.temperature.shape, jnp.int32)
        return Last(none - 1, none + ADAPT)

    def update(self, signal: Signal, action: Action, state: Last) -> tuple[Action, Last]:
        logits, _, warm = step_inputs(signal, action)
        m = _released_features(signal, logits, self.together)
        quadrants = quadrant(m.entropy, m.varentropy, self.thresholds)
        settings = clipped(quadrants, quadrant_settings(quadrants, m, self.constants))
        token, share = shares(logits, settings)
        place = drawn(share, self.candidates, self.together)
        log_probability = jax.nn.log_softmax(logits, -1)
        offered = jnp.take_along_axis(token, place, 1)
        score = jnp.take_along_axis(log_probability, offered, 1)  # plus the same for all
        best = jnp.take_along_axis(offered, score.argmax(-1)[:, None], 1)[:, 0]
        once = offered[:, 0]
        likeliest = jnp.argmax(logits, -1).astype(jnp.int32)
        chosen = jnp.select([quadrants == FLOW, quadrants == ADAPT], [likeliest, best], once)
        if self.pause >= 0:
            paused = signal.emitting & (state.token == self.pause)
            paused = paused.any() if self.together else paused
            chosen = jnp.where((quadrants == CLARIFY) & ~paused, self.pause, chosen)
        temperature = jnp.where(warm & (quadrants != FLOW), settings.temperature, action.temperature)
        action = action._replace(token=jnp.where(warm, chosen, -1), temperature=temperature)
        return action, Last(jnp.where(warm, chosen, -1), quadrants)
