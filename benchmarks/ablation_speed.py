"""Launches of the ablation that take turns, and the states they start from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import models
from entropic_jax import cache, parameters, start
from entropic_jax.analysis import ablation
from entropic_jax.analysis.ablation import Subject
from entropic_jax.control.presets import Preset

from .weights import CONFIG


def take_turns(
    subject: Subject, ways: dict[str, Preset], states: dict[str, Any], steps: int, repeat: int, context: int
) -> list[dict[str, Any]]:
    """Launches of `steps` steps, one configuration after another, the first launch of each not counted."""
    rows = []
    for turn in range(repeat + 1):
        for name, way in ways.items():
            states[name], trace, seconds = ablation.launch(subject, way, states[name], steps)
            ran = int(trace.emitted.sum())
            if turn and ran:
                kept = float(trace.kept_fraction[trace.emitted].mean())
                per_second = float(np.diff(trace.entropic_time[trace.emitted])[1:].sum() / seconds)
                rows.append(
                    {
                        "preset": name,
                        "context": context,
                        "milliseconds": 1e3 * seconds / ran,
                        "kept": kept,
                        "entropic_time_per_second": per_second,
                    }
                )
    return rows


def random_model() -> Subject:
    """The shape of `benchmarks.decode` with random weights."""
    names = {*models.Config.__dataclass_fields__} - {"max_position_embeddings"}
    sizes = {k: v for k, v in CONFIG.items() if k in names and not k.endswith("token_id")}
    config = models.Config(architecture=CONFIG["architectures"][0], max_position_embeddings=65536, **sizes)
    made = models.initialise(config, 0)
    return Subject(made.decoder, made.params)


def random_context(subject: Subject, way: Preset, context: int, room: int) -> Any:
    """A state whose cache holds `context` positions of random keys and values: only their number matters."""
    page_size = way.selection.page_size if way.selection else None
    pool = cache.allocate(subject.decoder.shape, 1, context + room, page_size=page_size)
    keys = iter(jax.random.split(jax.random.key(1), 64))
    noise = lambda x: 0.1 * jax.random.normal(next(keys), x.shape, x.dtype)  # small: no page has all the mass
    layers = (jax.tree.map(noise, layer) for layer in pool.layers)
    pool = pool._replace(layers=tuple(x._replace(value_norm=jnp.abs(x.value_norm)) for x in layers))
    state = start(
        subject.decoder,
        subject.params,
        way.controller,
        pool,
        [[1]],
        key=jax.random.key(0),
        max_tokens=context + room,
        sample=parameters(1, temperature=0.0),
        selection=way.selection,
    )
    return state._replace(length=jnp.full(1, context, jnp.int32))
