"""Recording of passes: each step of held-out texts with all pages, with fixed ε, and with fixed budgets.

Every pass of a step starts from the same KV cache, that of dense attention: what a step loses is what this
very step left unread.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import models
from entropic_jax.analysis import ablation
from entropic_jax.analysis.ablation import Subject
from entropic_jax.attention.page_selection import Selection
from entropic_jax.calibration import load_calibration
from entropic_jax.entropy import entropy_statistics
from entropic_jax.methods.presets import FINE_PAGES
from entropic_jax.phases.batch import Batch, gather_active
from entropic_jax.phases.forward import decode, narrowest
from entropic_jax.state import State
from entropic_jax.state.cache import Cache, bytes_per_number
from entropic_jax.state.ledger import weights_read

EVERYTHING_MAY_GO = 0.999  # ε at which the rules alone decide which pages are kept
DENSE = "dense"


class Passes(NamedTuple):
    """All passes of the steps of several texts; each `[texts, steps]` by the name of the pass."""

    entropy: dict[str, np.ndarray]  # H₁, nats
    divergence: dict[str, np.ndarray]  # KL(dense ‖ the pass), nats
    positions: dict[
        str, np.ndarray
    ]  # keys and values read, with the summaries in positions that cost as much


class Sizes(NamedTuple):
    """Bytes that a step reads."""

    weights: float  # of a pass, however many rows share it
    position: float  # of a key and a value of one KV head


def subject_of(folder: Path) -> Subject:
    """A model and the T_cal of its calibration; 1 for a model without one."""
    model = models.load(folder, "float32")
    try:
        belief_temperature = load_calibration(folder).temperature
    except FileNotFoundError:
        belief_temperature = 1.0
    return Subject(model.decoder, model.params, belief_temperature)


def sizes_of(subject: Subject) -> Sizes:
    """Bytes of the weights, and of a position in the dtype of the cache that `ablation.read` makes."""
    shape = subject.decoder.shape
    number = bytes_per_number(jax.tree.leaves(subject.params)[0].dtype, shape.head_dim)
    weights = float(weights_read(shape)) * narrowest(subject.params)
    return Sizes(weights, 2.0 * shape.head_dim * number)


def budget(pages: int) -> Selection:
    """A page policy that reads so many pages of a KV head, at most half of them by place alone."""
    rules = FINE_PAGES.rules
    sink, recent = min(rules.sink_pages, pages // 8), min(rules.recent_pages, pages // 4)
    rules = rules._replace(sink_pages=sink, recent_pages=recent, min_pages=pages)
    return replace(FINE_PAGES, rules=rules)


def record(
    subject: Subject,
    texts: Sequence[Sequence[int]],
    steps: int,
    limits: Sequence[float],
    budgets: Sequence[int],
    room: int = 0,
) -> Passes:
    """Every pass of the last `steps` tokens of texts of one length, read together.

    Args:
        subject: the model.
        texts: token ids; the last token of each is not read.
        steps: tokens at the end of each that are scored.
        limits: ε of the passes with a fixed ε.
        budgets: pages of the others.
        room: least positions of the cache: texts of all lengths share a program where it is the same.
    """
    context = len(texts[0]) - steps
    prompts = [text[:context] for text in texts]
    state = ablation.prefill(subject, prompts, max(steps + 1, room - context))
    tokens = jnp.asarray([text[context : context + steps] for text in texts], jnp.int32)
    policies, fixed = tuple(map(budget, budgets)), jnp.asarray(limits, jnp.float32)
    measured = _steps(subject.decoder, subject.params, state, tokens, fixed, policies)
    entropy, divergence, positions = (np.asarray(x, float).transpose(1, 2, 0) for x in measured)
    names = pass_names(limits, budgets)
    return Passes(*(dict(zip(names, x, strict=True)) for x in (entropy, divergence, positions)))


def pass_names(limits: Sequence[float], budgets: Sequence[int]) -> list[str]:
    """The names of the passes of a step, in the order in which they are recorded."""
    return [f"ε {limit:g}" for limit in limits] + [f"{pages} pages" for pages in budgets] + [DENSE]


@partial(jax.jit, static_argnames=("decoder", "policies"))
def _steps(
    decoder: Any,
    params: Any,
    state: State,
    tokens: jax.Array,
    limits: jax.Array,
    policies: tuple[Selection, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """H₁, KL and positions read, each `[steps, passes, rows]`.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        state: after the prompts.
        tokens: int32 `[rows, steps]`, the tokens to read.
        limits: float32 `[fixed ε]`.
        policies: the page policies of fixed size.
    """

    def body(state: State, token: jax.Array) -> tuple[State, Any]:
        _, state, batch = gather_active(state._replace(token=token), None)
        before, measured = batch.state.cache, []

        def look(cache: Cache, policy: Selection | None, limit: jax.Array) -> tuple[Cache, Any]:
            state = batch.state._replace(cache=with_summaries(cache, before), page_policy=policy)
            action = state.action._replace(dropped_mass_limit=jnp.full(token.shape, limit))
            after, output = decode(decoder, params, Batch(state._replace(action=action), batch.active), None)
            read = output.read
            return after.state.cache, (output.logits, read.positions + read.summaries)

        cache, fixed = jax.lax.scan(lambda cache, limit: look(cache, FINE_PAGES, limit), before, limits)
        for policy in policies:
            cache, one_budget = look(cache, policy, jnp.float32(EVERYTHING_MAY_GO))
            measured.append(one_budget)
        cache, dense = look(cache, None, jnp.float32(0))
        measured.append(dense)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *measured)
        logits, positions = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), fixed, stacked)
        entropy = entropy_statistics(logits / state.belief_temperature).entropy
        divergence = divergence_from(dense[0], logits)
        return state._replace(cache=cache, length=state.length + 1), (entropy, divergence, positions)

    return jax.lax.scan(body, state, tokens.T)[1]


def with_summaries(cache: Cache, before: Cache) -> Cache:
    """A cache with the page summaries of another, which a pass has not added its token to."""
    fields = ("key_min", "key_max", "key_sum", "value_norm")
    layers = tuple(
        layer._replace(**{name: getattr(old, name) for name in fields})
        for layer, old in zip(cache.layers, before.layers, strict=True)
    )
    return cache._replace(layers=layers)


def divergence_from(dense: jax.Array, logits: jax.Array) -> jax.Array:
    """KL(softmax(dense) ‖ softmax(logits)), nats, over the last axis; at least 0."""
    log_p, log_q = jax.nn.log_softmax(dense), jax.nn.log_softmax(logits)
    return jnp.maximum((jnp.exp(log_p) * (log_p - log_q)).sum(-1), 0.0)
