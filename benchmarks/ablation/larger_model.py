"""The speed of a larger shape with random weights, the share that is read imposed, beside other engines."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax import cache, models, parameters, start
from entropic_jax.analysis.ablation import Subject
from entropic_jax.analysis.studies import Row, take_turns
from entropic_jax.control.presets import FINE_PAGES, Gains, Preset, preset
from entropic_jax.ledger import HARDWARE
from entropic_jax.pallas import skinny_matmul

from .decode import write_prompts
from .weights import CONFIG
from .worker import PeerError, Peers

EVERYTHING_MAY_GO = 0.999  # a drop at which only the rules decide what stays


def random_model(quick: bool) -> Subject:
    """The shape of `benchmarks.decode` with random weights, or two layers of it."""
    names = {*models.Config.__dataclass_fields__} - {"max_position_embeddings"}
    sizes = {k: v for k, v in CONFIG.items() if k in names and not k.endswith("token_id")}
    sizes |= {"num_hidden_layers": 2} if quick else {}
    config = models.Config(architecture=CONFIG["architectures"][0], max_position_embeddings=65536, **sizes)
    made = models.initialise(config, 0)
    return Subject(made.decoder, made.params)


def halved(subject: Subject) -> Subject:
    """The same with matrices of bfloat16, as checkpoints have them, where products read them as they are."""
    narrow = lambda x: (
        x.astype("bfloat16") if x.ndim == 2 and skinny_matmul.reads_as_stored(x.shape, "bfloat16") else x
    )
    kept = {"embed_tokens": subject.params["embed_tokens"]}  # looked up, not multiplied
    return subject._replace(params={**jax.tree.map(narrow, subject.params), **kept})


def random_context(subject: Subject, way: Preset, context: int, room: int, dtype: str) -> Any:
    """A state whose cache holds `context` positions of random keys and values: only their number matters."""
    page_size = way.page_policy.page_size if way.page_policy else None
    pool = cache.allocate(subject.decoder.shape, 1, context + room, page_size=page_size, dtype=dtype)
    keys = iter(jax.random.split(jax.random.key(1), 256))
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
        page_policy=way.page_policy,
        hardware=HARDWARE["cpu"],
    )
    return state._replace(length=jnp.full(1, context, jnp.int32))


def imposed(context: int, kept: float) -> Preset:
    """`full`, reading the share `kept` in the layers that choose."""
    total = -(-context // (FINE_PAGES.page_size or 16))
    least = max(FINE_PAGES.rules.sink + FINE_PAGES.rules.recent, round(kept * total))
    gains = Gains(dropped_mass_limit=EVERYTHING_MAY_GO, lowest_dropped_mass_limit=EVERYTHING_MAY_GO)
    return preset("full", gains=gains)._replace(
        page_policy=replace(FINE_PAGES, rules=FINE_PAGES.rules._replace(least=least))
    )


def shape(context: int, kept: float, peers: Peers | None, engines: list[str], quick: bool) -> list[Row]:
    """Milliseconds a token of `off`, of `full` and of other engines, taking turns.

    Ours twice: in float32, and with weights, keys and values of bfloat16.
    """
    steps, repeat = (4, 2) if quick else (8, 12)
    wide, presets = random_model(quick), {"off": preset("off"), "full": imposed(context, kept)}
    ways, subjects, states = {}, {}, {}
    for ending, subject, dtype in (("", wide, "float32"), ("-half", halved(wide), "bfloat16")):
        for name, way in presets.items():
            ways[name + ending], subjects[name + ending] = way, subject
            room = steps * (repeat + 2) + 8
            states[name + ending] = random_context(subject, way, context, room, dtype)
    rows: list[Row] = []
    failed: set[str] = set()

    def ask(engine: str, do: str, *arguments: int | str) -> dict[str, Any] | None:
        if peers is None or engine in failed:
            return None
        try:
            return peers.ask(engine, do, *arguments)
        except PeerError as error:
            failed.add(engine)
            rows.append({"preset": engine, "context": context, "error": f"{do}: {error}"})
            return None

    capacity = context + (repeat + 3) * steps + 32
    if peers is not None:
        prompts, _ = write_prompts(peers.directory, 1, context)
        for engine in engines:
            ask(engine, "open", 1, capacity)
            ask(engine, "prefill", prompts)
            ask(engine, "warm", steps)

    def between(turn: int) -> None:
        for engine in engines:
            answer = ask(engine, "decode", steps)
            if answer and turn >= 0:
                spent = 1e3 * answer["seconds"] / steps
                rows.append({"preset": engine, "context": context, "turn": turn, "milliseconds": spent})

    rows += take_turns(subjects, ways, states, context, steps, repeat, between)
    for row in rows:
        row["imposed"] = kept
    return rows
