"""The k most probable tokens, the entropy and the varentropy of every row, in one pass over the logits.

Contract of every back end of `topk_entropy(logits, k, temperature, calibration)`:

* logits `[rows, vocabulary]`, float32 or bfloat16; −inf counts for nothing,
* k, static: how many tokens are wanted,
* temperature float32 `[rows]`, ≥ 0: what is sampled from; 0 is greedy, with moments 0,
* calibration float32 `[rows]`, > 0: the temperature at which the distribution is a belief,

returns `TopkEntropy`: the k largest logits in descending order with their indices, ties by the lower index;
log-sum-exp, entropy and varentropy, in nats, at both temperatures; and the head at calibration, which the
bounds of `entropy.py` take. All is float32. Where a row has fewer than k unmasked tokens, the places left
hold −inf and the index V, which a scatter drops. NaN is no candidate; a row with NaN or +inf, and one where
everything is masked, is no distribution: its entropies and its head are NaN, and those of no other row. Its
log-sum-exp is NaN, +inf and −inf.

Contract of every back end of `project(hidden, weight, k, temperature, calibration)`: the same for the logits
`hidden @ weight`, hidden `[rows, hidden]`, weight `[hidden, vocabulary]`, summed in float32; the logits of a
kernel never reach memory.

A back end that cannot serve a case raises NotImplementedError with the reason.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from ..dispatch import first_that_accepts
from . import reference
from .reference import Head, Moments, TopkEntropy

__all__ = ["Head", "Moments", "TopkEntropy", "project", "topk_entropy"]


def _on(platform: str, name: str) -> Callable[..., TopkEntropy]:
    """A back end for a platform: it declines elsewhere, unless it is asked for by name."""

    def call(*arguments: Any) -> TopkEntropy:
        here = jax.default_backend()
        if here != platform and os.environ.get("ENTROPIC_KERNELS") != platform:
            raise NotImplementedError(f"the default device is a {here}")
        if here == platform == "gpu":
            capability = jax.local_devices()[0].compute_capability
            if capability != "9.0":
                raise NotImplementedError(f"compute capability {capability}: 9.0 is served")
        # Pallas is imported where it is used: its parts for TPU and GPU cost 0.7 seconds.
        return getattr(import_module(f"{__name__}.{platform}"), name)(*arguments)

    return call


def _interpreted(name: str) -> Callable[..., TopkEntropy]:
    def call(*arguments: Any) -> TopkEntropy:
        from jax.experimental.pallas import tpu as pltpu

        with pltpu.force_tpu_interpret_mode():
            return getattr(import_module(f"{__name__}.tpu"), name)(*arguments)

    return call


# By name in ENTROPIC_KERNELS; in this order where none is named, so that `interpret` is only used by name.
TOPK_ENTROPY = {
    "tpu": _on("tpu", "topk_entropy"),
    "gpu": _on("gpu", "topk_entropy"),
    "xla": reference.topk_entropy,
    "interpret": _interpreted("topk_entropy"),
}
PROJECT = {
    "tpu": _on("tpu", "project"),
    "gpu": _on("gpu", "project"),
    "xla": reference.project,
    "interpret": _interpreted("project"),
}


def topk_entropy(
    logits: jax.Array, k: int, temperature: jax.Array | float = 1.0, calibration: jax.Array | float = 1.0
) -> TopkEntropy:
    """The result of the first back end that accepts; its gradient is the reference's.

    Temperatures are numbers or `[rows]`; beyond 1e-9 and 1e9 they count as these, but 0 as 0.
    Raises ValueError for k outside [1, V].

    >>> result = topk_entropy(jnp.log(jnp.array([[0.5, 0.25, 0.125, 0.125]])), 2)
    >>> result.indices.tolist(), round(float(result.head.mass[0]), 4)
    ([[0, 1]], 0.75)
    >>> round(float(result.calibrated.entropy[0]) / float(jnp.log(2)), 4)
    1.75
    """
    rows, vocabulary = logits.shape
    _check(k, vocabulary)
    return _topk_entropy(k, logits, *(_per_row(x, rows) for x in (temperature, calibration)))


def project(
    hidden: jax.Array,
    weight: jax.Array,
    k: int,
    temperature: jax.Array | float = 1.0,
    calibration: jax.Array | float = 1.0,
) -> TopkEntropy:
    """`topk_entropy(hidden @ weight, …)` by the first back end that accepts; its gradient is the reference's.

    >>> project(jnp.eye(2), jnp.array([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]]), 1).indices.tolist()
    [[1], [0]]
    """
    _check(k, weight.shape[1])
    return _project(k, hidden, weight, *(_per_row(x, hidden.shape[0]) for x in (temperature, calibration)))


def _check(k: int, vocabulary: int) -> None:
    if not 1 <= k <= vocabulary:
        raise ValueError(f"k is {k}; accepted are 1 to {vocabulary}, the size of the vocabulary")


def _per_row(temperature: jax.Array | float, rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (rows,))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _topk_entropy(k: int, logits: Any, temperature: Any, calibration: Any) -> TopkEntropy:
    return first_that_accepts("topk_entropy", TOPK_ENTROPY)(logits, k, temperature, calibration)


def _forward(k, *operands):
    return _topk_entropy(k, *operands), operands


def _backward(k, operands, gradient):
    _, pull = jax.vjp(lambda logits, *at: reference.topk_entropy(logits, k, *at), *operands)
    return pull(gradient)


_topk_entropy.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(k: int, hidden: Any, weight: Any, temperature: Any, calibration: Any) -> TopkEntropy:
    return first_that_accepts("topk_entropy.project", PROJECT)(hidden, weight, k, temperature, calibration)


def _forward_project(k, *operands):
    return _project(k, *operands), operands


def _backward_project(k, operands, gradient):
    _, pull = jax.vjp(lambda hidden, weight, *at: reference.project(hidden, weight, k, *at), *operands)
    return pull(gradient)


_project.defvjp(_forward_project, _backward_project)
