"""Entropix: four quadrants of entropy and varentropy decide how the next token is found.

    low H, low V    flow      the likeliest token
    high H, low V   clarify   say a set sequence of tokens, or draw hotter if it was said a moment ago
    low H, high V   explore   branch, and keep the best branch
    high H, high V  resample  go back to where the uncertainty began, and draw otherwise
    between         adapt     draw candidates, and keep the best by what follows each

Here is what one sequence does by itself: the measures, the quadrant, the candidates, and a token. Branching
and going back need pages of their own and are done around the loop, by `entropix_search`; without it, a row
draws its first candidate in these quadrants. `entropix_released` is the law as published, faults included.

Source: xjdr-alt/entropix (2024), its sampler and the constants of its main generation. Differs from it: the
attention is measured over what is held; agreement is agreement; entropies are in nats, and what enters the
formulas lies in [0, 1]: a share of the largest entropy possible for attention, the rank among the quantiles
of the model's own calibration for logits. The thresholds are such quantiles. Every row decides for itself
and draws with a key of its own; truncation keeps the likeliest token.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import sampling
from ..attention.statistics import Observation
from ..calibration import LEVELS, Calibration
from ..control.controller import STATIC, pytree
from ..sampling.randomness import random_bits
from ..sampling.truncation import truncate
from ..state import Action, Signal

Gain = float | jax.Array

FLOW, CLARIFY, EXPLORE, RESAMPLE, ADAPT = range(5)
QUADRANTS = ("flow", "clarify", "explore", "resample", "adapt")
NEVER = 1 << 20  # tokens since a clarification that was not made


class Thresholds(NamedTuple):
    """Where the quadrants meet; entropies, then varentropies."""

    low_entropy: Gain  # below: flow
    unsure_entropy: Gain  # above: clarify
    high_entropy: Gain  # below: explore, above: resample
    low_varentropy: Gain  # below: flow and clarify
    high_varentropy: Gain  # above: explore and resample


LEVELS_OF_THRESHOLDS = Thresholds(0.25, 0.9, 0.75, 0.5, 0.9)  # quantiles, each one of LEVELS


class Measures(NamedTuple):
    """What the formulas read; each `[rows]`."""

    entropy: jax.Array  # of the logits
    varentropy: jax.Array
    attention_entropy: jax.Array  # mean over heads
    attention_varentropy: jax.Array  # variance between heads
    agreement: jax.Array
    interaction: jax.Array


class Constants(NamedTuple):
    """The constants of the release; defaults are those of its main generation."""

    temperature: Gain = 0.666
    top_p: Gain = 0.9
    top_k: Gain = 27.0
    min_p: Gain = 0.03
    clarify: Gain = 1.3  # T × (this + `clarify_attention` · attention entropy)
    clarify_attention: Gain = 0.2
    explore: Gain = 1.2  # T × (this + `explore_interaction` · interaction)
    explore_interaction: Gain = 0.3
    explore_disagreement: Gain = 0.5  # top-k × (1 + this · (1 − agreement))
    resample: Gain = 2.0  # T × (this + `resample_attention` · attention varentropy)
    resample_attention: Gain = 0.5
    resample_top_p: Gain = 0.2  # top-p − this · attention entropy
    adapt_logits: Gain = 0.3  # T × (1 + this · (H + V) + …
    adapt_attention: Gain = 0.2  # … this · (attention entropy + attention varentropy) …
    adapt_agreement: Gain = 0.2  # … − this · agreement), and top-k × (1 + … − this · agreement)
    adapt_top_p: Gain = 0.1  # top-p × (1 + this · attention varentropy)
    adapt_top_k: Gain = 0.3  # top-k × (1 + this · interaction − …)
    adapt_min_p: Gain = 0.5  # min-p × (1 − this · (H + V))
    # The confidence of a candidate: H, attention entropy, V, attention varentropy, agreement, interaction.
    confidence: tuple[Gain, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


class Setting(NamedTuple):
    """How a row draws; each `[rows]`."""

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array  # float, whole numbers
    min_p: jax.Array


class Memory(NamedTuple):
    """The law's own state, and what a search reads of it; each `[rows]` unless stated."""

    spoken: jax.Array  # int32: tokens of the clarification said so far, 0 outside of one
    since: jax.Array  # int32: tokens since the last clarification
    quadrant: jax.Array  # int32: of the step
    confidence: jax.Array  # of the state in which the step found the sequence
    uncertain: jax.Array  # bool: the entropy of the step is above `high_entropy`
    barred: jax.Array  # int32: a token that the next step must not draw, −1 for none
    candidates: jax.Array  # int32 [rows, candidates]: distinct, the one emitted first; −1 where there is none
    log_probability: jax.Array  # [rows, candidates], of softmax(z)


def quadrant(entropy: jax.Array, varentropy: jax.Array, thresholds: Thresholds) -> jax.Array:
    """FLOW, CLARIFY, EXPLORE, RESAMPLE or ADAPT; in the unit of the thresholds, elementwise.

    All comparisons are strict; what meets none of the four is ADAPT. NaN is.

    >>> bits = Thresholds(0.1, 3.0, 5.0, 0.1, 5.0)
    >>> where = quadrant(jnp.array([0.05, 4.0, 1.0, 6.0, 2.0]), jnp.array([0.05, 0.05, 6.0, 6.0, 2.0]), bits)
    >>> [QUADRANTS[i] for i in where]
    ['flow', 'clarify', 'explore', 'resample', 'adapt']
    """
    calm, torn = varentropy < thresholds.low_varentropy, varentropy > thresholds.high_varentropy
    rules = (
        ((entropy < thresholds.low_entropy) & calm, FLOW),
        ((entropy > thresholds.unsure_entropy) & calm, CLARIFY),
        ((entropy < thresholds.high_entropy) & torn, EXPLORE),
        ((entropy > thresholds.high_entropy) & torn, RESAMPLE),
    )
    conditions, values = zip(*rules, strict=True)
    return jnp.select(conditions, [jnp.int32(v) for v in values], jnp.int32(ADAPT))


def setting(where: jax.Array, m: Measures, c: Constants) -> Setting:
    """Temperature and truncation in each quadrant, before any clip but those of the adaptive formulas.

    FLOW and CLARIFY differ in the temperature only: the former draws at the plain one, if at all.
    """
    doubt = m.entropy + m.varentropy
    focus = m.attention_entropy + m.attention_varentropy
    base = lambda x: jnp.full(where.shape, x, jnp.float32)
    temperature = c.temperature * jnp.select(
        [where == FLOW, where == CLARIFY, where == EXPLORE, where == RESAMPLE],
        [
            base(1.0),
            c.clarify + c.clarify_attention * m.attention_entropy,
            c.explore + c.explore_interaction * m.interaction,
            c.resample + c.resample_attention * m.attention_varentropy,
        ],
        1 + c.adapt_logits * doubt + c.adapt_attention * focus - c.adapt_agreement * m.agreement,
    )
    adapt, resample = where == ADAPT, where == RESAMPLE
    top_p = jnp.where(resample, c.top_p - c.resample_top_p * m.attention_entropy, base(c.top_p))
    adaptive = jnp.clip(c.top_p * (1 + c.adapt_top_p * m.attention_varentropy), 0.1, 1.0)
    top_p = jnp.where(adapt, adaptive, top_p)
    wide = jnp.floor(c.top_k * (1 + c.explore_disagreement * (1 - m.agreement)))
    adaptive = jnp.round(c.top_k * (1 + c.adapt_top_k * m.interaction - c.adapt_agreement * m.agreement))
    top_k = jnp.where(where == EXPLORE, wide, base(c.top_k))
    top_k = jnp.where(adapt, jnp.clip(adaptive, 1.0, 100.0), top_k)
    adaptive = jnp.clip(c.min_p * (1 - c.adapt_min_p * doubt), 0.01, 0.5)
    return Setting(temperature, top_p, top_k, jnp.where(adapt, adaptive, base(c.min_p)))


def confidence(m: Measures, c: Constants) -> jax.Array:
    """0.1 (1 − H) + 0.2 (1 − aH) + 0.3 (1 − V) + 0.4 (1 − aV) + 0.5 agreement + 0.6 interaction."""
    certain = (1 - m.entropy, 1 - m.attention_entropy, 1 - m.varentropy, 1 - m.attention_varentropy)
    terms = (*certain, m.agreement, m.interaction)
    weighted = [weight * term for weight, term in zip(c.confidence, terms, strict=True)]
    return jnp.stack(weighted).sum(0)


class Scale(NamedTuple):
    """Quantiles of the model's own entropy and varentropy, at `LEVELS`."""

    entropy: tuple[Gain, ...]
    varentropy: tuple[Gain, ...]


def rank(value: jax.Array, quantiles: tuple[Gain, ...]) -> jax.Array:
    """The share of tokens with less, in [0, 1], linear between the quantiles and up to twice the highest.

    >>> [round(float(rank(jnp.array(x), (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0))), 3) for x in (0.0, 1.0, 9.0)]
    [0.0, 0.5, 1.0]
    """
    points = jnp.stack([jnp.asarray(x, jnp.float32) for x in (0.0, *quantiles, 2 * quantiles[-1])])
    # Equal quantiles would divide by nothing.
    points = points + jnp.arange(points.shape[0], dtype=jnp.float32) * 1e-6
    return jnp.interp(value, points, jnp.asarray((0.0, *LEVELS, 1.0), jnp.float32))


def normalised(signal: Signal, scale: Scale) -> Measures:
    """The measures of a step, each in [0, 1]: 0 is certain, agreeing heads are 1."""
    focus = signal.focus
    if focus is None:
        raise ValueError("signal.focus is None; accepted is that of a step of a controller that `observes`")
    most = jnp.maximum(focus.most, 1e-6)
    return Measures(
        rank(signal.entropy, scale.entropy),
        rank(signal.varentropy, scale.varentropy),
        jnp.clip(focus.entropy / most, 0.0, 1.0),
        jnp.clip(4 * focus.varentropy / (most * most), 0.0, 1.0),  # a variance within [0, 1] is ¼ at most
        focus.agreement,
        focus.interaction / (1 + focus.interaction),
    )


def draw(key: jax.Array, logits: jax.Array, how: Setting, count: int) -> jax.Array:
    """Distinct tokens int32 `[rows, count]`, −1 where truncation leaves fewer.

    The first is a draw from softmax(truncate(z / T)); those after it are draws without replacement, by the
    largest of logits with Gumbel noise (Kool et al. 2019, arXiv 1903.06059). key `[rows]`, one a row.
    """
    rows, vocabulary = logits.shape
    highest = jnp.max(logits, -1, keepdims=True)
    scaled = (logits - jnp.where(jnp.isfinite(highest), highest, 0.0)) / how.temperature[:, None]
    limits = sampling.parameters(rows)._replace(
        top_k=how.top_k.astype(jnp.int32), top_p=how.top_p, min_p=how.min_p
    )
    bits = random_bits(key, vocabulary)
    value, token = jax.lax.top_k(truncate(scaled, limits) + sampling.gumbel(bits), min(count, vocabulary))
    offered = (value > -jnp.inf) | (jnp.arange(token.shape[1]) == 0)
    return jnp.pad(jnp.where(offered, token, -1), ((0, 0), (0, count - token.shape[1])), constant_values=-1)


def remember(rows: int, candidates: int) -> Memory:
    """The memory of sequences that begin."""
    none, zero = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
    blank = jnp.full((rows, candidates), -1, jnp.int32)
    scores = jnp.zeros((rows, candidates), jnp.float32)
    return Memory(none, none + NEVER, none + ADAPT, zero, none > 0, none - 1, blank, scores)


@pytree
class Entropix:
    """The quadrants of Entropix, as far as a row can follow them by itself.

    `clarification` is a sequence of token ids that is said in full where entropy is high and varentropy low,
    at most once in `patience` tokens; without one, a row draws hotter there. `candidates` is how many tokens
    are offered to a search. The request's temperature says only whether a row is greedy (0), in which case it
    is left alone; how a row draws is the law's business. Thresholds and scale come from a calibration, see
    `calibrated`; nats and nats². Not differentiable where it draws.
    """

    thresholds: Thresholds
    scale: Scale
    constants: Constants = Constants()
    patience: Gain = 32
    clarification: Annotated[tuple[int, ...], STATIC] = ()
    candidates: Annotated[int, STATIC] = 4
    observes: Annotated[Observation, STATIC] = Observation()

    def init(self, action: Action) -> Memory:
        return remember(action.temperature.shape[0], self.candidates)

    def update(self, signal: Signal, action: Action, state: Memory) -> tuple[Action, Memory]:
        logits, key, warm = needed(signal, action)
        m = normalised(signal, self.scale)
        where = quadrant(signal.entropy, signal.varentropy, self.thresholds)
        how = setting(where, m, self.constants)
        how = how._replace(temperature=jnp.maximum(how.temperature, 0.05))  # agreement cools: never to 0

        vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        allowed = jnp.where(vocabulary == state.barred[:, None], -jnp.inf, logits)
        state, said = speak(state, where == CLARIFY, self.clarification, self.patience)
        permitted = jnp.take_along_axis(logits, jnp.maximum(said, 0)[:, None], 1)[:, 0] > -jnp.inf
        said = jnp.where(permitted, said, -1)  # a grammar, or a bias, may forbid it
        flows = where == FLOW
        token = draw(key, allowed, how, self.candidates)
        likeliest = jnp.argmax(allowed, -1).astype(jnp.int32)
        alone = flows | (said >= 0)
        first = jnp.where(said >= 0, said, jnp.where(flows, likeliest, token[:, 0]))
        others = jnp.arange(self.candidates) > 0
        offered = jnp.where(others & alone[:, None], -1, token.at[:, 0].set(first))
        log_probability = jax.nn.log_softmax(logits, -1)
        state = state._replace(
            quadrant=jnp.where(said >= 0, CLARIFY, where),
            confidence=confidence(m, self.constants),
            uncertain=signal.entropy > self.thresholds.high_entropy,
            barred=jnp.full_like(state.barred, -1),
            candidates=offered,
            log_probability=jnp.take_along_axis(log_probability, jnp.maximum(offered, 0), 1),
        )
        temperature = jnp.where(warm & ~alone, how.temperature, action.temperature)
        return action._replace(token=jnp.where(warm, first, -1), temperature=temperature), state


def needed(signal: Signal, action: Action) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, keys, and the rows that are not greedy; ValueError outside of a step of the loop."""
    if signal.logits is None or signal.key is None or action.token is None:
        raise ValueError("signal.logits, signal.key or action.token is None; accepted are those of a step")
    return signal.logits, signal.key, action.temperature > 0


def speak(
    memory: Memory, wish: jax.Array, sequence: tuple[int, ...], patience: Gain
) -> tuple[Memory, jax.Array]:
    """The next token of the clarification where one is being said or begins now, −1 elsewhere."""
    if not sequence:
        return memory, jnp.full(wish.shape, -1, jnp.int32)
    saying = (memory.spoken > 0) | (wish & (memory.since >= patience))
    token = jnp.asarray(sequence, jnp.int32)[memory.spoken]
    memory = memory._replace(
        spoken=jnp.where(saying, (memory.spoken + 1) % len(sequence), 0),
        since=jnp.where(saying, 0, jnp.minimum(memory.since + 1, NEVER)),
    )
    return memory, jnp.where(saying, token, -1)


def calibrated(calibration: Calibration, **changes: Any) -> Entropix:
    """The law with thresholds and scale of the model's own quantiles; `changes` are other fields.

    >>> from entropic_jax.calibration import load_calibration
    >>> law = calibrated(load_calibration("models/embedded"), patience=16)
    >>> law.thresholds.low_entropy == law.scale.entropy[LEVELS.index(0.25)]
    True
    """
    entropy, varentropy = calibration.quantiles, calibration.varentropy_quantiles
    at = LEVELS_OF_THRESHOLDS
    find = lambda quantiles, level: quantiles[LEVELS.index(level)]
    thresholds = Thresholds(
        find(entropy, at.low_entropy),
        find(entropy, at.unsure_entropy),
        find(entropy, at.high_entropy),
        find(varentropy, at.low_varentropy),
        find(varentropy, at.high_varentropy),
    )
    fields: dict[str, Any] = {"thresholds": thresholds, "scale": Scale(entropy, varentropy), **changes}
    return Entropix(**fields)
