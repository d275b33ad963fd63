"""The state of the decode loop: what was measured, what is obeyed, and everything the next step needs.

Axes, in the order in which they appear: `rows` (sequences of a batch), `positions` (of a sequence),
`heads`, `kv_heads`, `head_dim`, `vocabulary`, `pages`, `page_size`, `steps` (of a launch).
Entropies are in nats, positions count tokens from 0.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .cache import Cache

RUNNING, STOPPED, FULL, FAILED, PREFILLING = range(5)  # the last: its prompt is not in the cache yet
FinishReason = Literal["stop", "length", "error"]
FINISH_REASONS: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length", FAILED: "error"}


class Sampling(NamedTuple):
    """Sampling parameters, one value per row; `parameters` builds and validates them."""

    temperature: jax.Array  # float32 [rows], >= 0; 0 is greedy
    top_k: jax.Array  # int32 [rows], 0 is off
    top_p: jax.Array  # float32 [rows], in [0, 1]; 1 is off
    min_p: jax.Array  # float32 [rows], in [0, 1]; 0 is off
    typical_p: jax.Array  # float32 [rows], in [0, 1]; 1 is off
    top_n_sigma: jax.Array  # float32 [rows], >= 0; 0 is off
    repetition_penalty: jax.Array  # float32 [rows], > 0; 1 is off; prompt and generated tokens
    presence_penalty: jax.Array  # float32 [rows], 0 is off; generated tokens
    frequency_penalty: jax.Array  # float32 [rows], 0 is off; generated tokens
    bias_tokens: jax.Array  # int32 [rows, slots]; -1 is an unused slot
    bias_values: jax.Array  # float32 [rows, slots], added to the logit; −inf bans the token


class History(NamedTuple):
    """What the penalties look back on."""

    prompt: jax.Array  # bool [rows, vocabulary]: the token occurs in the prompt
    generated: jax.Array  # int32 [rows, vocabulary]: how often the token was generated


class Focus(NamedTuple):
    """What the attention of a step looked like, mean over the layers observed; each `[rows]`, in nats."""

    entropy: jax.Array  # of the attention over positions, mean over heads
    varentropy: jax.Array  # variance of that entropy between the heads of a layer, nats²
    agreement: jax.Array  # of the heads: 1 where all attend alike, 0 where all attend elsewhere
    interaction: jax.Array  # mean |score|
    most: jax.Array  # ln of the number of positions, the largest entropy there could be


class Signal(NamedTuple):
    """What the step at hand measured, before it samples; each `[rows]`, in nats (nats² for the variances)."""

    entropy: jax.Array  # H₁ of the belief p₁ = softmax(z / T_cal)
    varentropy: jax.Array  # V₁ = Var[log p₁]
    tempered_entropy: jax.Array  # H_T of softmax(z / T) at the temperature T in force
    tempered_varentropy: jax.Array  # V_T
    surprisal: jax.Array  # −log p₁ of the token emitted last
    dropped_mass: jax.Array  # attention mass that the step left unread, estimated
    emitting: jax.Array  # bool: the row emits a token in this step; the measures of others are old
    runnable: jax.Array  # bool: the row has not ended
    length: jax.Array  # int32, positions in the cache
    # Known only while a step runs, not kept in State.
    logits: jax.Array | None = None  # z, float32 [rows, vocabulary], penalties included
    key: jax.Array | None = None  # [rows] random keys, of the row's seed and the position it samples for
    focus: Focus | None = None  # where the controller asks for it, see `observation`


class Action(NamedTuple):
    """What the loop obeys, held until rewritten; each `[rows]`."""

    temperature: jax.Array  # micro: of the token about to be sampled
    surprisal_limit: jax.Array  # micro: tokens of a larger −log softmax(z / T) are cut off; inf cuts none
    dropped_mass_limit: (
        jax.Array
    )  # meso: ε, the attention mass that the next step may leave unread, in [0, 1)
    quota: jax.Array  # macro: in the next step, 0 waits, 1 decodes, n lets it draft n − 1 tokens
    # int32, while a step runs: the token that the law has chosen itself, −1 where it is to be sampled.
    token: jax.Array | None = None


class Ledger(NamedTuple):
    """Running sums of a sequence; each `[rows]`."""

    steps: jax.Array  # int32, tokens emitted
    entropic_time: jax.Array  # τ = Σ max(0, H₁[t−1] − H₁[t])
    variation: jax.Array  # Σ |H₁[t−1] − H₁[t]|
    entropy: jax.Array  # Σ H₁[t]
    flops: jax.Array  # floating-point operations
    bytes_read: jax.Array  # weights (the row's share) and keys and values
    seconds: jax.Array  # C, by the roofline
    kv_bytes: jax.Array  # held now, not a sum


class State(NamedTuple):
    """Everything that step t + 1 needs. Saving it and resuming equals running through, bit for bit."""

    key: jax.Array  # the run's random key; a draw uses fold_in(fold_in(key, seed), position)
    seed: jax.Array  # int32 [rows]
    token: jax.Array  # int32 [rows], emitted last and not yet in the cache
    length: jax.Array  # int32 [rows], positions in the cache
    evicted: jax.Array  # int32 [rows], positions taken out of it: the next token stands at length + evicted
    limit: jax.Array  # int32 [rows], length at which the row is full
    status: jax.Array  # int32 [rows]: RUNNING, STOPPED, FULL, FAILED or PREFILLING
    stop: jax.Array  # int32 [rows, stops], tokens that end the row; −1 where unused
    belief_temperature: jax.Array  # float32 [], T_cal: H₁ is the entropy of softmax(z / T_cal)
    sampling: Sampling
    history: History
    signal: Signal
    action: Action
    control: Any  # the controller's own state
    page_policy: Any  # which pages are read (`attention.page_selection.PagePolicy`), None to read all; static
    page_policy_state: Any  # what the page policy carries from step to step
    age: jax.Array  # int32 [], steps since the start
    ledger: Ledger
    hardware: Any  # `ledger.Hardware`, by which the ledger counts seconds
    cache: Cache


class Trace(NamedTuple):
    """What a person wants to see of a launch; each `[steps, rows]`, valid where `emitted`."""

    emitted: jax.Array  # bool
    token: jax.Array  # int32
    entropy: jax.Array
    varentropy: jax.Array
    tempered_entropy: jax.Array
    tempered_varentropy: jax.Array
    surprisal: jax.Array
    temperature: jax.Array
    dropped_mass_limit: jax.Array  # as it was for this step
    dropped_mass: jax.Array
    kept_fraction: jax.Array  # of the keys and values held, how much was read
    certificate: jax.Array  # no head's output is further than this from dense attention, in ‖·‖₂
    entropic_time: jax.Array  # τ up to and including the token
    cost: jax.Array  # of this token, in roofline seconds
    likeliest: Any = ()  # `terms.Likeliest`, in steps with terms


def quiet_signal(rows: int) -> Signal:
    """The signal before anything was measured: zero throughout."""
    zero = jnp.zeros(rows, jnp.float32)
    no, none = jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32)
    return Signal(zero, zero, zero, zero, zero, zero, emitting=no, runnable=no, length=none)


def plain_action(temperature: jax.Array) -> Action:
    """Sample at the requested temperature `[rows]`, read every page, decode one token a step."""
    temperature = jnp.asarray(temperature, jnp.float32)
    return Action(
        temperature=temperature,
        surprisal_limit=jnp.full_like(temperature, jnp.inf),
        dropped_mass_limit=jnp.zeros_like(temperature),
        quota=jnp.ones(temperature.shape, jnp.int32),
    )
