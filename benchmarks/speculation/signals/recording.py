"""Records of drafts: what each drafter proposes at every position of a text, and what the text accepts of it.

Texts are those that the engine emits. Drafters and noise are the engine's, but no draft is stopped. A draft
token is accepted if and only if it is the token that the verified logits draw, and the emitted text is what
they draw, so a draft is accepted as far as it agrees with the text.
"""

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import chain
from entropic_jax.control import take_rows
from entropic_jax.entropy import surrogate
from entropic_jax.pallas.longest_match import longest_match
from entropic_jax.phases.batch import Batch, gather_active, scatter
from entropic_jax.phases.batch import record as enter_tokens
from entropic_jax.speculation import (
    ControlledModel,
    Draft,
    HeadDrafter,
    PassPlan,
    PrunedDrafter,
    Speculator,
    SuffixDrafter,
    verify_and_emit,
)
from entropic_jax.speculation.autoregressive import DraftedToken
from entropic_jax.speculation.draft_length import draft_length
from entropic_jax.state import State
from entropic_jax.state.pytree import STATIC, pytree

MOST_TOKENS = 15  # k
ENTROPY, TOP = "entropy", "top"


@pytree
class PrunedRecorder(PrunedDrafter):
    """A pruned drafter that never stops; as P(accepted) it states a statistic of each draft."""

    statistic: Annotated[str, STATIC] = ENTROPY

    def step(self, model: ControlledModel, batch: Batch, began: Batch) -> DraftedToken:
        """See `AutoregressiveDrafter`."""
        drafted = super().step(model, batch, began)
        if self.statistic == ENTROPY:
            return drafted
        features = drafted.state.features
        assert features is not None, "a headed model keeps what each token is drawn from"
        return _with_surprisal_of_top(drafted, model.decoder.logits(model.params, features))

    def probability(self, entropy: jax.Array) -> jax.Array:
        """The statistic as a number in (0, 1]: exp(−H), or the top probability."""
        return jnp.exp(-jnp.maximum(entropy, 0.0))


@pytree
class HeadRecorder(HeadDrafter):
    """A draft head that never stops; as P(accepted) it states a statistic of each draft."""

    statistic: Annotated[str, STATIC] = ENTROPY

    def step(self, model: ControlledModel, batch: Batch, began: Batch) -> DraftedToken:
        """See `AutoregressiveDrafter`."""
        drafted, params = super().step(model, batch, began), model.params
        decoder: Any = model.decoder
        if self.statistic == ENTROPY:
            return drafted
        logits = decoder.head.logits(params.target, params.draft, drafted.state.features)
        return _with_surprisal_of_top(drafted, logits)

    def probability(self, entropy: jax.Array) -> jax.Array:
        """The statistic as a number in (0, 1]: exp(−H), or the top probability."""
        return jnp.exp(-jnp.maximum(entropy, 0.0))


def _with_surprisal_of_top(drafted: DraftedToken, logits: jax.Array) -> DraftedToken:
    """The step with −ln of the top probability in place of the entropy, of the same distribution."""
    return drafted._replace(entropy=surrogate(logits / drafted.state.belief_temperature))


def recorders(headed: bool, most_tokens: int = MOST_TOKENS) -> dict[str, Any]:
    """The drafters that are recorded: two of each that has a distribution, for its two statistics.

    Args:
        headed: whether the model has a draft head.
        most_tokens: k.
    """
    nothing = jnp.zeros(1, jnp.float32)
    numbers = (nothing, nothing[:0])  # tables that are not read
    never = {"stop_below": 0.0, "most_tokens": most_tokens}
    result: dict[str, Any] = {}
    for statistic in (ENTROPY, TOP):
        pruned = PrunedRecorder(*numbers, **never, shortest_context=0, statistic=statistic)
        result[f"pruned {statistic}"] = pruned
        if headed:
            result[f"head {statistic}"] = HeadRecorder(*numbers, **never, statistic=statistic)
    return result


class Step(NamedTuple):
    """Record of a position."""

    token: jax.Array  # int32 [], that the engine emits there
    length: jax.Array  # int32 [], cached positions before it
    previous_entropy: jax.Array  # float32 [], nats, of the model where it drew the token before
    matched: jax.Array  # int32 [], length of the suffix match
    drafts: dict[str, Draft]  # by drafter, each [k]


@partial(jax.jit, static_argnames=("decoder", "steps"), donate_argnames="state")
def record(
    decoder: Any,
    params: Any,
    suffix: SuffixDrafter,
    drafters: dict[str, Any],
    state: State,
    steps: int,
) -> tuple[State, Step]:
    """Emits tokens one by one, through the engine's verification, and drafts before each of them.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        suffix: the suffix drafter, which is recorded too.
        drafters: the others, `recorders`.
        state: a single row, started with a speculator.
        steps: tokens to emit.

    Returns:
        The state, and the records, `[steps, …]`.
    """
    k = suffix.most_tokens
    emission = Speculator(suffix, draft_length(1, widths=(1,)))
    none = jnp.zeros((1, k), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros((1, k), jnp.float32)
    nothing = PassPlan(Draft(*none), none[1], jnp.int32(0))
    recorded: dict[str, Any] = {"suffix": suffix, **drafters}

    def advance(state: State, scanned: None) -> tuple[State, Step]:
        rows, state, batch = gather_active(state, None, k)
        model = ControlledModel(decoder, params, take_rows(chain(), rows))
        room = rows.gather(state.cache.granted) * state.cache.page_size
        most = jnp.maximum(jnp.minimum(room, batch.state.limit) - batch.state.length - 1, 0)
        drafting, drafts = batch, dict[str, Draft]()
        for name, drafter in recorded.items():
            drafting, draft = drafter.draft(model, drafting, most)
            drafts[name] = Draft(draft.tokens[0], draft.num_tokens[0], draft.acceptance[0])
        before = batch.state
        assert before.text is not None, "the state was started with a speculator"
        matched, _ = longest_match(before.text, before.length + before.evicted, suffix.longest)
        after, trace = verify_and_emit(emission, model, drafting, nothing, None)
        state = enter_tokens(scatter(state, rows, before, after), trace.token, trace.emitted)
        seen = Step(trace.token[0, 0], before.length[0], before.measured.entropy[0], matched[0], drafts)
        return state, seen

    return jax.lax.scan(advance, state, None, steps)


def num_accepted(tokens: np.ndarray, offered: np.ndarray, text: np.ndarray) -> np.ndarray:
    """The tokens that drafts begin with and the text has; int `[positions]`.

    Args:
        tokens: int `[positions, k]`, the drafts; the first token of a draft is for its own position.
        offered: int `[positions]`, the tokens of each draft.
        text: int `[positions + k − 1]` or more.
    """
    positions, k = tokens.shape
    following = np.lib.stride_tricks.sliding_window_view(text, k)[:positions]
    agrees = (tokens == following) & (np.arange(k) < offered[:, None])
    return np.cumprod(agrees, 1).sum(1)
