"""The k most probable tokens, the entropy and the varentropy of every row, in one pass over the logits.

Contract of every back end of `topk_entropy(logits, k, temperature, calibration)`:

* logits `[rows, vocabulary]`, float32 or bfloat16; −inf masks a token,
* k, static: the number of tokens to return,
* temperature float32 `[rows]`, ≥ 0: the sampling temperature; 0 is greedy, with moments 0,
* calibration float32 `[rows]`, > 0: the temperature at which the distribution is calibrated,

returns `TopkEntropy`, in float32: the k largest logits in descending order with their indices, ties by lower
index; log-sum-exp, entropy and varentropy, in nats, at both temperatures; and the summary of the k
largest at calibration, from which `entropy.py` computes bounds. If a row has fewer than k unmasked tokens,
the remaining places hold −inf and the index V, which a scatter drops. NaN is never among the k largest. A row
with NaN, with +inf or with every token masked is not a distribution: its entropies and its head are NaN, its
log-sum-exp is NaN, +inf or −inf respectively, and other rows are not affected.

Contract of every back end of `project(hidden, weight, k, temperature, calibration)`: the same for the logits
`hidden @ weight`, hidden `[rows, hidden]`, weight `[hidden, vocabulary]`, summed in float32; on a TPU
the logits never reach memory.

A back end that cannot serve a case raises NotImplementedError with the reason.
"""

import jax
import jax.numpy as jnp

from ..derivatives import with_derivatives_of
from ..dispatch import Operation, for_platform, interpreted
from . import reference
from .reference import Head, Moments, TopkEntropy

__all__ = ["Head", "Moments", "TopkEntropy", "project", "topk_entropy"]


TOPK_ENTROPY = Operation(
    "topk_entropy",
    {
        "tpu": for_platform("tpu", f"{__name__}.tpu", "topk_entropy"),
        "gpu": for_platform("gpu", f"{__name__}.gpu", "topk_entropy"),
        "xla": reference.topk_entropy,
        "interpret": interpreted(f"{__name__}.tpu", "topk_entropy"),
    },
)
PROJECT = Operation(
    "topk_entropy.project",
    {
        "tpu": for_platform("tpu", f"{__name__}.tpu", "project"),
        "gpu": for_platform("gpu", f"{__name__}.gpu", "project"),
        "xla": reference.project,
        "interpret": interpreted(f"{__name__}.tpu", "project"),
    },
)


def topk_entropy(
    logits: jax.Array,
    k: int,
    temperature: jax.Array | float = 1.0,
    calibration: jax.Array | float = 1.0,
    *,
    backend: str | None = None,
) -> TopkEntropy:
    """The k largest logits and both entropies of every row; the gradient is that of the reference.

    The first back end that supports the case computes it, or the one named by `backend`.

    Temperatures are numbers or `[rows]`. They are clipped to [1e-9, 1e9], except 0, which is greedy.
    Raises ValueError for k outside [1, V].

    Args:
        logits: `[rows, vocabulary]`, float32 or bfloat16; −inf counts for nothing.
        k: how many tokens, in [1, vocabulary]; static.
        temperature: float32, a number or `[rows]`, ≥ 0, of what is sampled from; 0 is greedy, with moments 0.
        calibration: float32, a number or `[rows]`, > 0, at which the distribution is a belief.
        backend: the name of the back end to use; None takes the first that supports the case.

    >>> result = topk_entropy(jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]])), 2)
    >>> result.indices.tolist(), round(float(result.head.head_mass[0]), 4)
    ([[0, 1]], 0.75)
    >>> round(float(result.calibrated.entropy[0]) / float(jnp.log(2)), 4)
    1.75
    """
    rows, vocabulary = logits.shape
    _check(k, vocabulary)
    return _topk_entropy((k, backend), logits, *(_per_row(x, rows) for x in (temperature, calibration)))


def project(
    hidden: jax.Array,
    weight: jax.Array,
    k: int,
    temperature: jax.Array | float = 1.0,
    calibration: jax.Array | float = 1.0,
    *,
    backend: str | None = None,
) -> TopkEntropy:
    """`topk_entropy(hidden @ weight, …)`, fused where the back end can; gradients are the reference's.

    Args:
        hidden: `[rows, hidden]`.
        weight: `[hidden, vocabulary]`.
        k, temperature, calibration, backend: as for `topk_entropy`.

    >>> project(jnp.eye(2), jnp.array([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]), 1).indices.tolist()
    [[1], [0]]
    """
    _check(k, weight.shape[1])
    at = (_per_row(x, hidden.shape[0]) for x in (temperature, calibration))
    return _project((k, backend), hidden, weight, *at)


def _check(k: int, vocabulary: int) -> None:
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k must be between 1 and {vocabulary}, the size of the vocabulary; got {k}")


def _per_row(temperature: jax.Array | float, rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (rows,))


def _reference_of(settings, logits, *at):
    return reference.topk_entropy(logits, settings[0], *at)


def _call(settings, logits, *at):
    k, backend = settings
    return TOPK_ENTROPY(logits, k, *at, backend=backend)


def _project_reference_of(settings, hidden, weight, *at):
    return reference.project(hidden, weight, settings[0], *at)


def _project_call(settings, hidden, weight, *at):
    k, backend = settings
    return PROJECT(hidden, weight, k, *at, backend=backend)


_topk_entropy = with_derivatives_of(_reference_of, _call)
_project = with_derivatives_of(_project_reference_of, _project_call)
