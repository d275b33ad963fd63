"""Decoding step of a model with the shape of Llama 3.1 8B and random weights, with and without control."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax import models, parameters, start
from entropic_jax.analysis import ablation
from entropic_jax.analysis.ablation import Subject
from entropic_jax.methods.presets import Preset, preset
from entropic_jax.models.decoder import Decoder, structure
from entropic_jax.state import cache

from .timing import CALLS, device_seconds, on_cpu, wall_seconds

EIGHT_BILLION: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
STEPS = 16  # of a launch
PRESETS = ("off", "full-lossy")


def measure(quick: bool, repeat: int) -> Iterator[dict[str, Any]]:
    """One entry for each context and preset; none on a CPU unless `quick`."""
    if on_cpu() and not quick:
        return
    contexts = [256] if quick else [8192, 131072]
    room = STEPS * (CALLS + 1) * (repeat + 1) + 8
    subject = random_model(TINY if quick else EIGHT_BILLION, max(contexts) + room)
    weights = sum(x.nbytes for x in jax.tree.leaves(subject.params))
    weights -= subject.params["embed_tokens"]["weight"].nbytes  # of which a row is read
    for context in contexts:
        for name in PRESETS:
            setting = preset(name)
            state = random_context(subject, setting, context, room)
            keys = state.cache.layers[0].keys
            held = 2 * len(state.cache.layers) * context * keys.shape[1] * keys.shape[3] * keys.dtype.itemsize
            launch = Launch(subject, setting, state)
            launch()  # compiles
            clock = wall_seconds if on_cpu() else device_seconds
            measured = [clock(launch) / STEPS for _ in range(repeat)]
            yield {
                "shape": {"context": context, "rows": 1, "dtype": str(keys.dtype)},
                "engine": name,
                "bytes": weights + held,  # of a step that reads everything
                "kept": launch.kept,
                "seconds": measured,
            }
            del launch, state


class Launch:
    """A launch of `STEPS` steps that continues from the state of the one before."""

    def __init__(self, subject: Subject, setting: Preset, state: Any) -> None:
        self.subject, self.setting, self.state, self.kept = subject, setting, state, 1.0

    def __call__(self) -> Any:
        self.state, trace, _ = ablation.launch(self.subject, self.setting, self.state, STEPS)
        self.kept = float(trace.kept_fraction[trace.emitted].mean())
        return self.state.token


def random_model(sizes: dict[str, Any], context: int) -> Subject:
    """A model with random weights, made on the default device."""
    config = models.Config("LlamaForCausalLM", **sizes, max_position_embeddings=context)
    dtype = "float32" if on_cpu() else "bfloat16"
    leaves, tree = jax.tree.flatten(structure(config)[1])
    key = jax.random.key(0)

    arrays = []
    for number, leaf in enumerate(leaves):
        norm = len(leaf.shape) == 1
        fresh = jax.random.fold_in(key, number)
        arrays.append(jnp.ones(leaf.shape, dtype) if norm else _normal(fresh, leaf.shape, dtype))
    return Subject(Decoder(config), jax.tree.unflatten(tree, arrays))


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, dtype) / jnp.asarray(math.sqrt(shape[0]), dtype)


def random_context(subject: Subject, setting: Preset, context: int, room: int) -> Any:
    """A state whose KV cache holds `context` positions of random keys and values."""
    page_size = setting.page_policy.page_size if setting.page_policy and on_cpu() else None
    dtype = "float32" if on_cpu() else "bfloat16"
    pool = cache.allocate(subject.decoder.shape, 1, context + room, page_size=page_size, dtype=dtype)
    state = start(
        subject.decoder,
        subject.params,
        setting.controller,
        pool,
        [[1]],
        key=jax.random.key(0),
        max_tokens=context + room,
        sample=parameters(1, temperature=0.0),
        page_policy=setting.page_policy,
    )
    layers = []
    for number, layer in enumerate(state.cache.layers):
        keys = iter(jax.random.split(jax.random.key(number), len(layer)))

        # Small: no page has all the mass.
        def noise(x):
            return jax.random.normal(next(keys), x.shape, x.dtype) * jnp.asarray(0.1, x.dtype)

        filled = jax.tree.map(noise, layer)
        layers.append(filled._replace(value_norm=jnp.abs(filled.value_norm)))
    grown = state.cache._replace(layers=tuple(layers))
    return state._replace(cache=grown, length=jnp.full(1, context, jnp.int32))
