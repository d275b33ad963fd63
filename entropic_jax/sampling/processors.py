"""Logits processors: repetition, presence and frequency penalties and logit bias, with the history they read.

Rows are independent, and `lax.cond` skips the work where no row of the batch asks for it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..state import History, Sampling


def history(rows: int, vocabulary: int) -> History:
    """The history of `rows` sequences before their first token."""
    return History(jnp.zeros((rows, vocabulary), bool), jnp.zeros((rows, vocabulary), jnp.int32))


def _inside(tokens: jax.Array, valid: jax.Array | bool, vocabulary: int) -> jax.Array:
    # A negative index would wrap around; an index past the end is dropped by the scatter.
    return jnp.where(valid & (tokens >= 0), tokens, vocabulary)


def record(history: History, tokens: jax.Array, active: jax.Array) -> History:
    """Counts generated tokens; one scatter, in place where the history is donated or carried.

    Args:
        history: the rows' history.
        tokens: int32 `[rows]` or `[n, rows]`; a token outside the vocabulary changes nothing.
        active: bool of the same shape; a token that is not active is not counted.

    >>> record(history(2, 3), jnp.array([1, 2]), jnp.array([True, False])).generated.tolist()
    [[0, 1, 0], [0, 0, 0]]
    """
    rows, vocabulary = history.generated.shape
    indices = (jnp.arange(rows), _inside(tokens, active, vocabulary))
    return history._replace(generated=history.generated.at[indices].add(1, mode="drop"))


def adjusts(sampling: Sampling) -> jax.Array:
    """Whether any row has a penalty or a bias, bool `[]`; otherwise `penalise` changes nothing.

    >>> from entropic_jax.sampling import parameters
    >>> bool(adjusts(parameters(2))), bool(adjusts(parameters(2, presence_penalty=[0.0, 0.5])))
    (False, True)
    """
    return jnp.any(_penalising(sampling) | jnp.any(sampling.bias_tokens >= 0, axis=-1))


def _penalising(sampling: Sampling) -> jax.Array:
    penalties = sampling.presence_penalty, sampling.frequency_penalty
    return (sampling.repetition_penalty != 1) | (penalties[0] != 0) | (penalties[1] != 0)


def penalise(logits: jax.Array, sampling: Sampling, history: History) -> jax.Array:
    """Applies the repetition, presence and frequency penalties and the bias, in this order.

        z' = (z / r if z > 0 else z · r)  for tokens of the prompt or generated ones
        z'' = z' − presence · [count > 0] − frequency · count + bias

    Counts are of generated tokens only. Where no row has a penalty or a bias, the history is not read. Masked
    tokens (−inf) stay masked. Differentiable in the logits and in the real-valued parameters.

    Args:
        logits: float32 `[rows, vocabulary]`.
        sampling: the parameters of the rows.
        history: tokens of the prompt and generated ones.

    Source: Keskar et al. 2019 (arXiv 1909.05858) for repetition, the OpenAI API for presence and frequency.

    >>> from entropic_jax.sampling import parameters
    >>> sampling = parameters(1, repetition_penalty=2.0, logit_bias={2: 1.5})
    >>> seen = record(history(1, 3), jnp.array([0]), jnp.array([True]))
    >>> penalise(jnp.array([[3.0, 3.0, 3.0]]), sampling, seen).tolist()
    [[1.5, 3.0, 4.5]]
    """
    logits = logits.astype(jnp.float32)
    repeating = sampling.repetition_penalty != 1
    penalising = _penalising(sampling)

    def apply(logits):
        count = history.generated
        penalty = sampling.repetition_penalty[:, None]
        repeated = (history.prompt | (count > 0)) & repeating[:, None]
        changed = jnp.where(repeated, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        changed -= jnp.where(count > 0, sampling.presence_penalty[:, None], 0.0)
        changed -= sampling.frequency_penalty[:, None] * count.astype(jnp.float32)
        # A row that does not penalise keeps its very bits, whatever the compiler contracts above.
        changed = jnp.where(penalising[:, None], changed, logits)
        rows, vocabulary = logits.shape
        indices = (jnp.arange(rows)[:, None], _inside(sampling.bias_tokens, True, vocabulary))
        return changed.at[indices].add(sampling.bias_values, mode="drop")

    return lax.cond(adjusts(sampling), apply, lambda logits: logits, logits)
