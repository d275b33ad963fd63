"""Correctness checks on the default device: the small cases of the kernels' tests, against float64."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from entropic_jax.pallas import paged_attention, topk_entropy
from entropic_jax.pallas.paged_attention import cases as paged_cases
from entropic_jax.pallas.self_test import BFLOAT16, FLOAT32, difference
from entropic_jax.pallas.topk_entropy import cases as topk_cases

from .timing import on_cpu


def run() -> Iterator[dict[str, str]]:
    """The verdict on each case. Empty on a CPU, where the test suite covers the kernels."""
    if on_cpu():
        return
    for operation, name, call in calls(jax.default_backend()):
        yield {"operation": operation, "case": name, "verdict": verdict(call)}


def calls(backend: str) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Operation, case, and a function that returns the error of a back end over the tolerance."""
    for case in paged_cases.SMALL:
        if case.soft_cap is None:
            yield "decode", case.name, partial(_decode, case, backend)
    for case in topk_cases.SMALL:
        yield "topk_entropy", case.name, partial(_topk_entropy, case, backend)


def verdict(call: Callable[[], float]) -> str:
    """`yes`, `declines: …` or `fails: …`."""
    try:
        error = call()
    except ExceptionGroup as declined:
        return f"declines: {declined.exceptions[0]}"
    except Exception as failure:  # becomes an entry of the results
        return f"fails: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
    return "yes" if error <= 1 else f"fails: {error:.2g} times the tolerance"


def _decode(case: paged_cases.Case, backend: str) -> float:
    inputs = paged_cases.build(case)
    arguments = jax.tree.map(jnp.asarray, tuple(inputs))
    outputs = jax.jit(partial(paged_attention.decode, backend=backend))(*arguments)
    tolerance = FLOAT32 if case.dtype == "float32" else BFLOAT16
    return difference(tuple(outputs), paged_cases.exact(case, inputs)) / tolerance


def _topk_entropy(case: topk_cases.Case, backend: str) -> float:
    inputs = topk_cases.build(case)
    logits, *at = map(jnp.asarray, inputs)

    def call(logits, *at):
        return topk_entropy.topk_entropy(logits, case.k, *at, backend=backend)

    return difference(jax.jit(call)(logits, *at), topk_cases.exact(inputs, case.k)) / FLOAT32
