"""Speed of the reference model at an imposed kept fraction, and of other engines."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax import parameters, start
from entropic_jax.analysis.ablation import Subject
from entropic_jax.analysis.studies import Row, interleave
from entropic_jax.methods.presets import FINE_PAGES, Gains, Preset, preset
from entropic_jax.pallas import skinny_matmul
from entropic_jax.state import cache
from entropic_jax.state.ledger import HARDWARE

from ..harness.baselines.pool import EngineError, EnginePool
from ..harness.baselines.reference_model import random_model, write_prompts

EVERYTHING_MAY_GO = 0.999  # ε at which the rules alone decide which pages are kept


def halved(subject: Subject) -> Subject:
    """The same model with matrices of bfloat16, where products read them without conversion."""

    def narrow(x: Any) -> Any:
        return x.astype("bfloat16") if x.ndim == 2 and skinny_matmul.reads_as_stored("bfloat16") else x

    kept = {"embed_tokens": subject.params["embed_tokens"]}  # looked up, not multiplied
    return subject._replace(params={**jax.tree.map(narrow, subject.params), **kept})


def random_context(subject: Subject, setting: Preset, context: int, room: int, dtype: str) -> Any:
    """A state whose KV cache holds `context` positions of random keys and values.

    Args:
        subject: the model.
        setting: the preset.
        context: positions in the cache.
        room: positions after them.
        dtype: the dtype of keys and values.
    """
    page_size = setting.page_policy.page_size if setting.page_policy else None
    pool = cache.allocate(subject.decoder.shape, 1, context + room, page_size=page_size, dtype=dtype)
    keys = iter(jax.random.split(jax.random.key(1), 256))

    # small: no page has all the mass
    def noise(x):
        return 0.1 * jax.random.normal(next(keys), x.shape, x.dtype)

    layers = (jax.tree.map(noise, layer) for layer in pool.layers)
    pool = pool._replace(layers=tuple(x._replace(value_norm=jnp.abs(x.value_norm)) for x in layers))
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
        hardware=HARDWARE["cpu"],
    )
    return state._replace(length=jnp.full(1, context, jnp.int32))


def imposed(context: int, kept: float) -> Preset:
    """`full-lossy`, keeping the fraction `kept` in the layers that select pages."""
    total = -(-context // (FINE_PAGES.page_size or 16))
    least = max(FINE_PAGES.rules.sink_pages + FINE_PAGES.rules.recent_pages, round(kept * total))
    gains = Gains(dropped_mass_limit=EVERYTHING_MAY_GO, lowest_dropped_mass_limit=EVERYTHING_MAY_GO)
    return preset("full-lossy", gains=gains)._replace(
        page_policy=replace(FINE_PAGES, rules=FINE_PAGES.rules._replace(min_pages=least))
    )


def larger_model(
    context: int, kept: float, pool: EnginePool | None, engines: list[str], quick: bool
) -> list[Row]:
    """Milliseconds a token of `off`, of `full-lossy` and of other engines, taking turns.

    Ours run twice: in float32, and with weights, keys and values of bfloat16.

    Args:
        context: positions in the KV cache.
        kept: fraction of the pages that `full-lossy` keeps.
        pool: runs the other engines.
        engines: their names.
        quick: fewer layers and steps.
    """
    steps, repeat = (4, 2) if quick else (8, 12)
    wide, presets = random_model(quick), {"off": preset("off"), "full-lossy": imposed(context, kept)}
    settings, subjects, states = {}, {}, {}
    for ending, subject, dtype in (("", wide, "float32"), ("-half", halved(wide), "bfloat16")):
        for name, setting in presets.items():
            settings[name + ending], subjects[name + ending] = setting, subject
            room = steps * (repeat + 2) + 8
            states[name + ending] = random_context(subject, setting, context, room, dtype)
    rows: list[Row] = []
    failed: set[str] = set()

    def call(engine: str, method: str, *arguments: int | str) -> dict[str, Any] | None:
        if pool is None or engine in failed:
            return None
        try:
            return pool.call(engine, method, *arguments)
        except EngineError as error:
            failed.add(engine)
            rows.append({"preset": engine, "context": context, "error": f"{method}: {error}"})
            return None

    capacity = context + (repeat + 3) * steps + 32
    if pool is not None:
        prompts, _ = write_prompts(pool.directory, 1, context)
        for engine in engines:
            call(engine, "open", 1, capacity)
            call(engine, "prefill", prompts)
            call(engine, "warm", steps)

    def decode_with_engines(repetition: int) -> None:
        for engine in engines:
            answer = call(engine, "decode", steps)
            if answer and repetition >= 0:
                spent = 1e3 * answer["seconds"] / steps
                rows.append({"preset": engine, "context": context, "turn": repetition, "milliseconds": spent})

    rows += interleave(subjects, settings, states, context, steps, repeat, decode_with_engines)
    for row in rows:
        row["imposed"] = kept
    return rows
