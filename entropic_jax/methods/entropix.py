"""Entropix: four quadrants of entropy H and varentropy V decide how the next token is selected.

    low H, low V    flow      the likeliest token
    high H, low V   clarify   a fixed clarification sequence, or a hotter draw if it was emitted recently
    low H, high V   explore   branch, and keep the best branch
    high H, high V  resample  go back to where the uncertainty began, and draw again
    between         adapt     draw candidates, and keep the best by what follows each

This file is the part that a row does by itself: features, quadrant, candidates and a token. Branching and
going back need pages of their own and are done around the loop, by `entropix_search`. Without it, a row emits
its first candidate in these quadrants. `entropix_released` is the law as published, faults included.

Source: xjdr-alt/entropix (2024), its sampler and the constants of its main generation. Differs from it:
attention is measured over the positions held; agreement is 1 where all heads attend alike; entropies are in
nats; the formulas read features in [0, 1], for attention a share of the largest possible entropy, for logits
the rank among the quantiles of the model's own calibration. The thresholds are such quantiles. Every row
decides for itself and draws with its own key; truncation keeps the likeliest token.
"""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import sampling
from ..attention.statistics import Observation
from ..calibration import LEVELS, Calibration
from ..sampling.randomness import random_bits
from ..sampling.truncation import truncate
from ..state import Action, Signal
from ..state.pytree import STATIC, Gain, pytree

FLOW, CLARIFY, EXPLORE, RESAMPLE, ADAPT = range(5)
QUADRANTS = ("flow", "clarify", "explore", "resample", "adapt")
NEVER = 1 << 20  # tokens since a clarification that was not made


class Thresholds(NamedTuple):
    """Boundaries of the quadrants; entropies, then varentropies, in nats and nats²."""

    low_entropy: Gain  # below: flow
    unsure_entropy: Gain  # above: clarify
    high_entropy: Gain  # below: explore, above: resample
    low_varentropy: Gain  # below: flow and clarify
    high_varentropy: Gain  # above: explore and resample


LEVELS_OF_THRESHOLDS = Thresholds(0.25, 0.9, 0.75, 0.5, 0.9)  # quantiles, each one of LEVELS


class QuadrantFeatures(NamedTuple):
    """Inputs of the quadrant formulas; each `[rows]`."""

    entropy: jax.Array  # of the logits
    varentropy: jax.Array
    attention_entropy: jax.Array  # mean over heads
    attention_varentropy: jax.Array  # variance between heads
    agreement: jax.Array
    interaction: jax.Array


class Constants(NamedTuple):
    """Constants of the formulas; the defaults are those of the main generation of the release."""

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


class SamplerSettings(NamedTuple):
    """Temperature and truncation of a draw; each `[rows]`."""

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array  # float, whole numbers
    min_p: jax.Array


class EntropixState(NamedTuple):
    """State of the law, which a search reads too; each `[rows]` unless stated."""

    clarification_index: jax.Array  # int32: clarification tokens emitted so far, 0 outside of one
    tokens_since_clarification: jax.Array  # int32: tokens since the last clarification
    quadrant: jax.Array  # int32: of the step
    confidence: jax.Array  # of the sequence's state at the step
    uncertain: jax.Array  # bool: the entropy of the step is above `high_entropy`
    banned_token: jax.Array  # int32: a token that the next step must not draw, −1 for none
    candidates: jax.Array  # int32 [rows, candidates]: distinct, the one emitted first; −1 where there is none
    log_probability: jax.Array  # [rows, candidates], of softmax(z)


def quadrant(entropy: jax.Array, varentropy: jax.Array, thresholds: Thresholds) -> jax.Array:
    """The quadrant, int32, elementwise: FLOW, CLARIFY, EXPLORE, RESAMPLE or ADAPT.

    All comparisons are strict; ADAPT where none of the four applies, and for NaN.

    Args:
        entropy: in the unit of the thresholds.
        varentropy: in the square of that unit; the shape is that of the entropy.
        thresholds: the thresholds that separate the quadrants.

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


def quadrant_settings(
    quadrants: jax.Array, features: QuadrantFeatures, constants: Constants
) -> SamplerSettings:
    """Temperature and truncation in each quadrant; only the adaptive formulas clip.

    FLOW and CLARIFY differ in temperature only. FLOW has the base temperature.

    Args:
        quadrants: int32 `[rows]`, from `quadrant`.
        features: entropies of logits and attention, each `[rows]`.
        constants: the constants of the formulas.
    """
    doubt = features.entropy + features.varentropy
    focus = features.attention_entropy + features.attention_varentropy
    base = lambda x: jnp.full(quadrants.shape, x, jnp.float32)
    temperature = constants.temperature * jnp.select(
        [quadrants == FLOW, quadrants == CLARIFY, quadrants == EXPLORE, quadrants == RESAMPLE],
        [
            base(1.0),
            constants.clarify + constants.clarify_attention * features.attention_entropy,
            constants.explore + constants.explore_interaction * features.interaction,
            constants.resample + constants.resample_attention * features.attention_varentropy,
        ],
        1
        + constants.adapt_logits * doubt
        + constants.adapt_attention * focus
        - constants.adapt_agreement * features.agreement,
    )
    adapt, resample = quadrants == ADAPT, quadrants == RESAMPLE
    top_p = jnp.where(
        resample,
        constants.top_p - constants.resample_top_p * features.attention_entropy,
        base(constants.top_p),
    )
    adaptive = jnp.clip(
        constants.top_p * (1 + constants.adapt_top_p * features.attention_varentropy), 0.1, 1.0
    )
    top_p = jnp.where(adapt, adaptive, top_p)
    wide = jnp.floor(constants.top_k * (1 + constants.explore_disagreement * (1 - features.agreement)))
    adaptive = jnp.round(
        constants.top_k
        * (1 + constants.adapt_top_k * features.interaction - constants.adapt_agreement * features.agreement)
    )
    top_k = jnp.where(quadrants == EXPLORE, wide, base(constants.top_k))
    top_k = jnp.where(adapt, jnp.clip(adaptive, 1.0, 100.0), top_k)
    adaptive = jnp.clip(constants.min_p * (1 - constants.adapt_min_p * doubt), 0.01, 0.5)
    return SamplerSettings(temperature, top_p, top_k, jnp.where(adapt, adaptive, base(constants.min_p)))


def confidence(features: QuadrantFeatures, constants: Constants) -> jax.Array:
    """0.1 (1 − H) + 0.2 (1 − aH) + 0.3 (1 − V) + 0.4 (1 − aV) + 0.5 agreement + 0.6 interaction."""
    certain = (
        1 - features.entropy,
        1 - features.attention_entropy,
        1 - features.varentropy,
        1 - features.attention_varentropy,
    )
    terms = (*certain, features.agreement, features.interaction)
    weighted = [weight * term for weight, term in zip(constants.confidence, terms, strict=True)]
    return jnp.stack(weighted).sum(0)


class QuantileScale(NamedTuple):
    """Quantiles of the model's own entropy and varentropy, at `LEVELS`."""

    entropy: tuple[Gain, ...]
    varentropy: tuple[Gain, ...]


def quantile_rank(value: jax.Array, quantiles: tuple[Gain, ...]) -> jax.Array:
    """The quantile rank of a value, in [0, 1]: linear between the quantiles, 1 from twice the highest on.

    >>> quantiles = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0)
    >>> [round(float(quantile_rank(jnp.array(x), quantiles)), 3) for x in (0.0, 1.0, 9.0)]
    [0.0, 0.5, 1.0]
    """
    points = jnp.stack([jnp.asarray(x, jnp.float32) for x in (0.0, *quantiles, 2 * quantiles[-1])])
    # Equal quantiles would divide by nothing.
    points = points + jnp.arange(points.shape[0], dtype=jnp.float32) * 1e-6
    return jnp.interp(value, points, jnp.asarray((0.0, *LEVELS, 1.0), jnp.float32))


def normalised_features(signal: Signal, scale: QuantileScale) -> QuadrantFeatures:
    """The features of a step, each in [0, 1]; agreement is 1 where all heads attend alike."""
    focus = signal.focus
    if focus is None:
        raise ValueError("signal.focus must be measured, by a controller with `observes`; got None")
    most = jnp.maximum(focus.max_entropy, 1e-6)
    return QuadrantFeatures(
        quantile_rank(signal.entropy, scale.entropy),
        quantile_rank(signal.varentropy, scale.varentropy),
        jnp.clip(focus.entropy / most, 0.0, 1.0),
        jnp.clip(4 * focus.varentropy / (most * most), 0.0, 1.0),  # a variance within [0, 1] is ¼ at most
        focus.agreement,
        focus.interaction / (1 + focus.interaction),
    )


def draw_candidates(key: jax.Array, logits: jax.Array, settings: SamplerSettings, count: int) -> jax.Array:
    """Draws distinct candidate tokens.

    The first is a draw from softmax(truncate(z / T)), the others are draws without replacement, by the
    largest logits with Gumbel noise (Kool et al. 2019, arXiv 1903.06059).

    Args:
        key: random keys, `[rows]`.
        logits: `[rows, vocabulary]`.
        settings: temperature and truncation of each row.
        count: candidates; static.

    Returns:
        int32 `[rows, count]`, −1 where truncation leaves fewer.
    """
    rows, vocabulary = logits.shape
    highest = jnp.max(logits, -1, keepdims=True)
    scaled = (logits - jnp.where(jnp.isfinite(highest), highest, 0.0)) / settings.temperature[:, None]
    limits = sampling.parameters(rows)._replace(
        top_k=settings.top_k.astype(jnp.int32), top_p=settings.top_p, min_p=settings.min_p
    )
    bits = random_bits(key, vocabulary)
    value, token = jax.lax.top_k(truncate(scaled, limits) + sampling.gumbel(bits), min(count, vocabulary))
    offered = (value > -jnp.inf) | (jnp.arange(token.shape[1]) == 0)
    return jnp.pad(jnp.where(offered, token, -1), ((0, 0), (0, count - token.shape[1])), constant_values=-1)


def initial_state(rows: int, candidates: int) -> EntropixState:
    """The state of new sequences."""
    none, zero = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.float32)
    blank = jnp.full((rows, candidates), -1, jnp.int32)
    scores = jnp.zeros((rows, candidates), jnp.float32)
    return EntropixState(none, none + NEVER, none + ADAPT, zero, none > 0, none - 1, blank, scores)


@pytree
class Entropix:
    """The quadrants of Entropix for one row.

    Rows at temperature 0 are greedy and stay unchanged; otherwise the law sets the temperature. Not
    differentiable where it draws. `calibrated` builds the law from a calibration.

    Args:
        thresholds: boundaries of the quadrants, nats and nats².
        scale: quantiles of the model's entropy and varentropy.
        constants: constants of the formulas.
        patience: tokens between two clarifications, at least.
        clarification: token ids that are emitted in full where entropy is high and varentropy low; empty for
            hotter draws instead; static.
        candidates: tokens offered to a search; static.
        observes: the attention observation that the features need; static.
    """

    thresholds: Thresholds
    scale: QuantileScale
    constants: Constants = Constants()
    patience: Gain = 32
    clarification: Annotated[tuple[int, ...], STATIC] = ()
    candidates: Annotated[int, STATIC] = 4
    observes: Annotated[Observation, STATIC] = Observation()

    def init(self, action: Action) -> EntropixState:
        return initial_state(action.temperature.shape[0], self.candidates)

    def update(self, signal: Signal, action: Action, state: EntropixState) -> tuple[Action, EntropixState]:
        logits, key, warm = step_inputs(signal, action)
        features = normalised_features(signal, self.scale)
        quadrants = quadrant(signal.entropy, signal.varentropy, self.thresholds)
        settings = quadrant_settings(quadrants, features, self.constants)
        settings = settings._replace(
            temperature=jnp.maximum(settings.temperature, 0.05)
        )  # agreement lowers the temperature, but never to 0

        vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        allowed = jnp.where(vocabulary == state.banned_token[:, None], -jnp.inf, logits)
        state, clarification_token = _next_clarification_token(
            state, quadrants == CLARIFY, self.clarification, self.patience
        )
        permitted = (
            jnp.take_along_axis(logits, jnp.maximum(clarification_token, 0)[:, None], 1)[:, 0] > -jnp.inf
        )
        clarification_token = jnp.where(
            permitted, clarification_token, -1
        )  # a grammar or a bias may forbid it
        in_flow = quadrants == FLOW
        token = draw_candidates(key, allowed, settings, self.candidates)
        likeliest = jnp.argmax(allowed, -1).astype(jnp.int32)
        alone = in_flow | (clarification_token >= 0)
        first = jnp.where(
            clarification_token >= 0, clarification_token, jnp.where(in_flow, likeliest, token[:, 0])
        )
        others = jnp.arange(self.candidates) > 0
        offered = jnp.where(others & alone[:, None], -1, token.at[:, 0].set(first))
        log_probability = jax.nn.log_softmax(logits, -1)
        state = state._replace(
            quadrant=jnp.where(clarification_token >= 0, CLARIFY, quadrants),
            confidence=confidence(features, self.constants),
            uncertain=signal.entropy > self.thresholds.high_entropy,
            banned_token=jnp.full_like(state.banned_token, -1),
            candidates=offered,
            log_probability=jnp.take_along_axis(log_probability, jnp.maximum(offered, 0), 1),
        )
        temperature = jnp.where(warm & ~alone, settings.temperature, action.temperature)
        return action._replace(token=jnp.where(warm, first, -1), temperature=temperature), state


def step_inputs(signal: Signal, action: Action) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, keys, and the rows that are not greedy. Raises ValueError outside a step of the loop."""
    if signal.logits is None or signal.key is None or action.token is None:
        raise ValueError("signal.logits, signal.key and action.token must be those of a step; got None")
    return signal.logits, signal.key, action.temperature > 0


def _next_clarification_token(
    state: EntropixState, requested: jax.Array, sequence: tuple[int, ...], patience: Gain
) -> tuple[EntropixState, jax.Array]:
    """The new state, and the next clarification token where one is in progress or begins; −1 elsewhere."""
    if not sequence:
        return state, jnp.full(requested.shape, -1, jnp.int32)
    speaking = (state.clarification_index > 0) | (requested & (state.tokens_since_clarification >= patience))
    token = jnp.asarray(sequence, jnp.int32)[state.clarification_index]
    state = state._replace(
        clarification_index=jnp.where(speaking, (state.clarification_index + 1) % len(sequence), 0),
        tokens_since_clarification=jnp.where(
            speaking, 0, jnp.minimum(state.tokens_since_clarification + 1, NEVER)
        ),
    )
    return state, jnp.where(speaking, token, -1)


def calibrated(calibration: Calibration, **changes: Any) -> Entropix:
    """The law with thresholds and scale from a calibration; `changes` set other fields of `Entropix`.

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
    fields: dict[str, Any] = {
        "thresholds": thresholds,
        "scale": QuantileScale(entropy, varentropy),
        **changes,
    }
    return Entropix(**fields)
