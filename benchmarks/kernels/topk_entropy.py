"""Top-k and entropy of a batch of logits, in one pass and in several."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax.pallas import topk_entropy

from .timing import interleaved_seconds, on_cpu


def measure(quick: bool, repeat: int) -> Iterator[dict[str, Any]]:
    """One entry for each back end, and for `lax.top_k` with `logsumexp`, which computes less."""
    rows, vocabulary, k = (4, 2000, 16) if quick else (64, 128256, 64)
    dtype = "float32" if on_cpu() else "bfloat16"
    logits = 3 * jax.random.normal(jax.random.key(0), (rows, vocabulary), dtype)
    temperature = jnp.full(rows, 0.7)
    reasons = topk_entropy.TOPK_ENTROPY.decline_reasons(logits, k, temperature, temperature)
    names = [name for name, reason in reasons.items() if reason is None]
    programs = {name: partial(jax.jit(partial(_ours, k, name)), logits, temperature) for name in names}
    programs["lax.top_k + logsumexp"] = partial(jax.jit(partial(_plain, k)), logits)
    for name, measured in interleaved_seconds(programs, repeat).items():
        shape = {"rows": rows, "vocabulary": vocabulary, "k": k, "dtype": dtype}
        yield {"shape": shape, "engine": name, "bytes": logits.nbytes, "seconds": measured}


def _ours(k: int, backend: str, logits: jax.Array, temperature: jax.Array) -> Any:
    return topk_entropy.topk_entropy(logits, k, temperature, backend=backend)


def _plain(k: int, logits: jax.Array) -> Any:
    return jax.lax.top_k(logits, k), jax.nn.logsumexp(logits.astype(jnp.float32), -1)
