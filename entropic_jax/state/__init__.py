"""State of the decode loop: measurements, actions, and everything else that the next step needs.

Axes, in the order in which they appear: `rows` (sequences of a batch), `positions` (of a sequence),
`heads`, `kv_heads`, `head_dim`, `vocabulary`, `pages`, `page_size`, `steps` (of a launch).
Entropies are in nats, positions count tokens from 0. `cache` holds the keys and values, and `row_subset`
gathers and scatters rows.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .cache import Cache

# Status of a row; PREFILLING: part of its prompt is not in the cache yet; PAUSED: its next token waits for
# the host, to the end of the launch.
RUNNING, STOPPED, FULL, FAILED, PREFILLING, PAUSED = range(6)
FinishReason = Literal["stop", "length", "error"]
FINISH_REASONS: dict[int, FinishReason] = {STOPPED: "stop", FULL: "length", FAILED: "error"}


class Sampling(NamedTuple):
    """Sampling parameters, one value per row; `parameters` builds and validates them."""

    temperature: jax.Array  # float32 [rows], >= 0; 0 is greedy
    top_k: jax.Array  # int32 [rows], 0 is off
    top_p: jax.Array  # float32 [rows], in (0, 1]; 1 is off
    min_p: jax.Array  # float32 [rows], in [0, 1]; 0 is off
    typical_p: jax.Array  # float32 [rows], in (0, 1]; 1 is off
    top_n_sigma: jax.Array  # float32 [rows], >= 0; 0 is off
    epsilon_cutoff: jax.Array  # float32 [rows], in [0, 1]; 0 is off
    eta_cutoff: jax.Array  # float32 [rows], in [0, 1]; 0 is off
    top_h: jax.Array  # float32 [rows], in (0, 1]; 1 is off
    xtc_probability: jax.Array  # float32 [rows], in [0, 1]; 0 is off
    xtc_threshold: jax.Array  # float32 [rows], in [0, 0.5]
    repetition_penalty: jax.Array  # float32 [rows], > 0; 1 is off; prompt and generated tokens
    presence_penalty: jax.Array  # float32 [rows], 0 is off; generated tokens
    frequency_penalty: jax.Array  # float32 [rows], 0 is off; generated tokens
    dry_multiplier: jax.Array  # float32 [rows], >= 0; 0 is off; the latest tokens
    dry_base: jax.Array  # float32 [rows], >= 1
    dry_allowed_length: jax.Array  # int32 [rows], >= 1
    bias_tokens: jax.Array  # int32 [rows, slots]; -1 is an unused slot
    bias_values: jax.Array  # float32 [rows, slots], added to the logit; −inf bans the token


class History(NamedTuple):
    """Tokens that the penalties read."""

    prompt: jax.Array  # bool [rows, vocabulary]: the token occurs in the prompt
    generated: jax.Array  # int32 [rows, vocabulary]: how often the token was generated
    latest: jax.Array  # int32 [rows, window]: token i of prompt and text is at i modulo the window; -1: none
    number: jax.Array  # int32 [rows]: tokens of prompt and text


class Focus(NamedTuple):
    """Statistics of a step's attention, mean over the observed layers; each float32 `[rows]`, in nats."""

    entropy: jax.Array  # of the attention over positions, mean over heads
    varentropy: jax.Array  # variance of that entropy between the heads of a layer, nats²
    agreement: jax.Array  # between heads: 1 where all attend alike, 0 where no two share a position
    interaction: jax.Array  # mean |score|
    max_entropy: jax.Array  # ln of the number of positions, the largest possible entropy


class Measured(NamedTuple):
    """Measurements of a row's latest token; each float32 `[rows]`, in nats (nats² for the variances)."""

    entropy: jax.Array  # H₁ of the belief p₁ = softmax(z / T_cal)
    varentropy: jax.Array  # V₁ = Var[log p₁]
    tempered_entropy: jax.Array  # H_T of softmax(z / T) at the temperature T in force
    tempered_varentropy: jax.Array  # V_T
    surprisal: jax.Array  # −log p₁ of the emitted token
    dropped_mass: jax.Array  # attention mass that the step left unread, estimated


class Signal(NamedTuple):
    """Everything that `Controller.update` may read; one entry per row. Built anew for every token.

    It describes the rows of the step before their tokens are sampled: the entropies are those of the token to
    come, `surprisal` is that of the token before.
    """

    entropy: jax.Array  # as in `Measured`, and so are the next five
    varentropy: jax.Array
    tempered_entropy: jax.Array
    tempered_varentropy: jax.Array
    surprisal: jax.Array
    dropped_mass: jax.Array
    emitting: jax.Array  # bool: the row emits a token in this step; the measurements of others are old
    runnable: jax.Array  # bool: the row can advance in the next step
    length: jax.Array  # int32, positions in the cache
    requested_temperature: jax.Array  # of the sampling parameters, which no controller changes
    logits: jax.Array | None = None  # z, float32 [rows, vocabulary], after penalties and constraints
    key: jax.Array | None = None  # [rows] random keys, of the row's seed and the position it samples for
    focus: Focus | None = None  # where the controller asks for it, see `attention.statistics`


class SchedulingSignal(NamedTuple):
    """Everything that `Controller.schedule` may read: all rows of the batch, after sampling."""

    entropy: jax.Array  # as in `Measured`, and so are the next five
    varentropy: jax.Array
    tempered_entropy: jax.Array
    tempered_varentropy: jax.Array
    surprisal: jax.Array
    dropped_mass: jax.Array
    emitting: jax.Array  # bool: the row emitted a token in this step; the measurements of others are old
    runnable: jax.Array  # bool: the row can advance in the next step
    length: jax.Array  # int32, positions in the cache


class Action(NamedTuple):
    """Control inputs of the loop, kept until a controller rewrites them; one entry per row."""

    temperature: jax.Array  # micro: of the token about to be sampled
    surprisal_limit: jax.Array  # micro: tokens with a larger −log softmax(z / T) are excluded; inf: none
    dropped_mass_limit: jax.Array  # meso-lossy: ε, attention mass the next step may leave unread, in [0, 1)
    quota: jax.Array  # macro: whether the row advances in the next step, 1, or waits, 0
    token: jax.Array  # int32: the token that a controller has chosen itself; −1 where it is to be sampled


class TopLogprobs(NamedTuple):
    """Log-probabilities (natural) of the emitted token and of the likeliest ones, under softmax(z).

    Before penalties, temperature and truncation; 0 throughout in a step in which no row asks for them.
    """

    logprob: jax.Array  # float32 [rows], of the emitted token
    token: jax.Array  # int32 [rows, k], the likeliest first
    token_logprob: jax.Array  # float32 [rows, k]


class Hardware(NamedTuple):
    """The two limits of a roofline (Williams, Waterman and Patterson 2009)."""

    peak: jax.Array | float  # FLOP/s
    bandwidth: jax.Array | float  # bytes/s from main memory


class Ledger(NamedTuple):
    """Totals of a sequence since its start; each `[rows]`."""

    steps: jax.Array  # int32, tokens emitted
    entropic_time: jax.Array  # τ = Σ max(0, H₁[t−1] − H₁[t])
    variation: jax.Array  # Σ |H₁[t−1] − H₁[t]|
    entropy: jax.Array  # Σ H₁[t]
    flops: jax.Array  # floating-point operations
    bytes_read: jax.Array  # weights (the row's share) and keys and values
    seconds: jax.Array  # C, by the roofline
    kv_bytes: jax.Array  # held now, not a sum


class State(NamedTuple):
    """Everything that step t + 1 needs.

    Saving and restoring it gives the results of an uninterrupted run, bit for bit.
    """

    key: jax.Array  # the run's random key; a draw uses fold_in(fold_in(key, seed), position)
    seed: jax.Array  # int32 [rows]
    token: jax.Array  # int32 [rows], emitted last and not yet in the cache
    length: jax.Array  # int32 [rows], positions in the cache
    # int32 [rows], positions removed from the cache: the next token has position length + evicted.
    evicted: jax.Array
    limit: jax.Array  # int32 [rows], length at which the row is full
    status: jax.Array  # int32 [rows]: one of those above
    stop: jax.Array  # int32 [rows, stops], tokens that end the row; −1 where unused
    belief_temperature: jax.Array  # float32 [], T_cal: H₁ is the entropy of softmax(z / T_cal)
    sampling: Sampling
    history: History
    measured: Measured
    action: Action
    control: Any  # state of the controller: any pytree of arrays [rows, …] and `row_subset.Shared` values
    page_policy: Any  # a static `PagePolicy` (a higher layer defines it, hence `Any`); None reads every page
    page_policy_state: Any  # state of the page policy between steps: any pytree
    ledger: Ledger
    hardware: Hardware  # by which the ledger counts seconds
    cache: Cache
    text: jax.Array | None = None  # int32 [rows, context], tokens by position, where drafters read them
    speculation: Any = ()  # what the draft-length law remembers per row: any pytree
    adapter: jax.Array | None = None  # int32 [rows], LoRA adapter, 0 for none; None where the model has none
    features: jax.Array | None = None  # float32 [rows, hidden], what `token` was drawn from, for a draft head
    # An `ExpertPolicy` (see `page_policy`); None reads the experts that routers choose.
    expert_policy: Any = None


# The fields of `State` whose arrays have one entry per row, apart from what is `row_subset.Shared` in them.
ROW_FIELDS = (
    *("seed", "token", "length", "evicted", "limit", "status", "stop", "sampling", "history"),
    *("measured", "action", "control", "text", "speculation", "page_policy_state", "ledger", "adapter"),
    "features",
)
# The fields that the emission of a token changes, apart from `text`.
EMITTED_FIELDS = (
    *("token", "length", "status", "history"),
    *("measured", "action", "control", "ledger", "features"),
)


class Trace(NamedTuple):
    """Measurements and actions of a launch, for reporting; each `[tokens, rows]`, valid where `emitted`."""

    emitted: jax.Array  # bool
    token: jax.Array  # int32
    entropy: jax.Array
    varentropy: jax.Array
    tempered_entropy: jax.Array
    tempered_varentropy: jax.Array
    surprisal: jax.Array
    temperature: jax.Array
    dropped_mass_limit: jax.Array  # as it was for this token
    dropped_mass: jax.Array
    kept_fraction: jax.Array  # fraction of the cached keys and values that was read
    certificate: jax.Array  # no head's output is further than this from dense attention, in ‖·‖₂; loose
    entropic_time: jax.Array  # τ up to and including the token
    cost: jax.Array  # of this token, in roofline seconds
    num_drafted: jax.Array  # int32, at the first token of a verification pass: tokens drafted for it
    from_draft: jax.Array  # bool: the token is a drafted one that was accepted; it took no pass of its own
    top_logprobs: TopLogprobs | tuple[()] = ()  # in steps with constraints
    experts_read: jax.Array | tuple[()] = ()  # int32 [tokens, rows, layers], in steps with an expert policy

    @property
    def num_tokens(self) -> jax.Array:
        """How many tokens each row emitted, int32 `[rows]`."""
        return self.emitted.sum(0, dtype=jnp.int32)


def unmeasured(rows: int) -> Measured:
    """The measurements before the first token: zero throughout."""
    zero = jnp.zeros(rows, jnp.float32)
    return Measured(zero, zero, zero, zero, zero, zero)


def quiet_signal(rows: int) -> Signal:
    """A signal of `rows` rows that emit nothing, all measurements zero; their requests ask for T = 1."""
    no, none = jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32)
    plain = jnp.ones(rows, jnp.float32)
    return Signal(*unmeasured(rows), emitting=no, runnable=no, length=none, requested_temperature=plain)


def plain_action(temperature: jax.Array) -> Action:
    """Sample at the requested temperature `[rows]`, read every page, decode one token a step."""
    temperature = jnp.asarray(temperature, jnp.float32)
    return Action(
        temperature=temperature,
        surprisal_limit=jnp.full_like(temperature, jnp.inf),
        dropped_mass_limit=jnp.zeros_like(temperature),
        quota=jnp.ones(temperature.shape, jnp.int32),
        token=jnp.full(temperature.shape, -1, jnp.int32),
    )
