"""What runs on the device: three functions of one board, which each of them consumes and returns.

`apply_updates` is every edit of the host, `prefill` a chunk of some prompts, `decode` some steps of all
running rows. `programs` compiles them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entropic_jax import State, Trace, cache, loop
from entropic_jax.attention.page_selection import PagePolicy
from entropic_jax.control.entropy_drop import AR1, predicted_drop
from entropic_jax.methods import cache_compression
from entropic_jax.methods.entropix_branches import Plan, Tally
from entropic_jax.methods.method import Method
from entropic_jax.prefill import PrefillChunk, PrefillOutput
from entropic_jax.sampling.constraints import Constraints
from entropic_jax.sampling_params import DEVICE_PARAMETERS
from entropic_jax.state import FULL, Likeliest

from ..transcript import TRACE_FIELDS
from . import branching
from .branching import BranchState
from .row_controllers import for_launch, set_gains

# Columns of `Commands.integers` and `.numbers`: sampling parameters come after what else a job brings.
WHOLE_NUMBERS = tuple(name for name, line in DEVICE_PARAMETERS.items() if line.accepts.kind is int)
NUMBERS = tuple(name for name, line in DEVICE_PARAMETERS.items() if line.accepts.kind is float)
ROW, SEED, TOKEN, LIMIT, STATUS, SHARED, BRANCHES = range(7)
INTEGERS = 7 + len(WHOLE_NUMBERS)


Array = Any  # of NumPy on the host, of JAX in a program
PARKED = ("history", "signal", "action", "control", "ledger")


class DeviceState(NamedTuple):
    """Everything on the device that changes: the rows, and the gains of their controllers.

    What the host calls a row is a slot of as many rows of the state as a sequence may have branches.
    """

    state: State
    controller: Any
    branch_state: BranchState | None = None  # of the searches, where sequences may branch

    @property
    def group(self) -> int:
        """Rows of a slot."""
        return (
            1
            if self.branch_state is None
            else self.state.status.shape[0] // self.branch_state.delivered.shape[0]
        )


class UpdateBatch(NamedTuple):
    """Edits of the host, of a fixed size; in this order: keep pages, end rows, give pages up, place jobs."""

    retained_pages: Array  # int32 [m], pages that the host keeps
    freed_rows: Array  # bool [rows]
    released_pages: Array  # int32 [m], pages that the host gives up
    integers: Array  # int32 [k, INTEGERS], of each job to place; its row is `rows` where there is none
    numbers: Array  # float32 [k, len(NUMBERS)]
    stops: Array  # int32 [k, stops]
    bias_tokens: Array  # int32 [k, slots]
    bias_values: Array  # float32 [k, slots]
    pages: Array  # int32 [k, most pages of a row], the first SHARED of which the job shares
    gains: Array  # float32 [k, n], of its controller
    prompt: Array | None = None  # bool [k, vocabulary], and
    generated: Array | None = None  # int32 [k, vocabulary]: its history, where a job is penalised


class DecodeOutput(NamedTuple):
    """What came of a launch; a row's tokens are the first `count` steps of it."""

    count: jax.Array  # int32 [rows]
    token: jax.Array  # int32 [n, rows]; n is the capacity, and more where tokens wait for branches
    metrics: jax.Array  # float32 [len(MEASURES), n, rows]
    status: jax.Array  # int32 [rows]
    length: jax.Array  # int32 [rows], of the text: what was taken out of the cache counts
    table: jax.Array  # int32 [rows, most pages of a row]
    forecast: jax.Array  # float32 [rows], E[ΔH⁺] of the next token, nats
    steps: jax.Array  # int32 [], that were run
    seconds: jax.Array  # float32 [rows], of the roofline, that the sequence has cost with all its branches
    tally: jax.Array  # int32 [len(Tally)], what searches came to
    likeliest: Likeliest | tuple[()]  # [n, rows, …]


def apply_updates(blank: State, device_state: DeviceState, batch: UpdateBatch) -> DeviceState:
    """Edit the board. `blank` is a row that holds nothing, as a state of one row."""
    state, rows = device_state.state, device_state.state.status.shape[0]
    slot, shared = batch.integers[:, ROW], batch.integers[:, SHARED]
    row, group = (
        slot * device_state.group,
        (slot[:, None] * device_state.group + jnp.arange(device_state.group)).reshape(-1),
    )
    ended = jnp.repeat(batch.freed_rows, device_state.group)
    pool = cache.retain(state.cache, batch.retained_pages)
    pool = cache.release_rows(pool, ended)
    pool = cache.release(pool, batch.released_pages)
    pool = cache.share(pool, row, batch.pages, shared)
    placed = jnp.zeros(rows, bool).at[group].set(True, mode="drop")

    def clear(old, new):
        if old.ndim == 0 or old.shape[0] != rows:
            return old
        return jnp.where(placed.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    small = {name: value for name, value in state._asdict().items() if name != "cache"}
    state = state._replace(**jax.tree.map(clear, small, {name: getattr(blank, name) for name in small}))
    put = lambda array, values: array.at[row].set(values.astype(array.dtype), mode="drop")
    numbers = {name: batch.numbers[:, i] for i, name in enumerate(NUMBERS)}
    numbers |= {name: batch.integers[:, i] for i, name in enumerate(WHOLE_NUMBERS, BRANCHES + 1)}
    sampling = state.sampling._replace(
        **{name: put(getattr(state.sampling, name), values) for name, values in numbers.items()},
        bias_tokens=put(state.sampling.bias_tokens, batch.bias_tokens),
        bias_values=put(state.sampling.bias_values, batch.bias_values),
    )
    history = state.history
    if batch.prompt is not None and batch.generated is not None:
        history = history._replace(
            prompt=put(history.prompt, batch.prompt),
            generated=put(history.generated, batch.generated),
        )
    state = state._replace(
        seed=put(state.seed, batch.integers[:, SEED]),
        token=put(state.token, batch.integers[:, TOKEN]),
        length=put(state.length, shared * pool.page_size),
        limit=put(state.limit, batch.integers[:, LIMIT]),
        status=put(jnp.where(ended, FULL, state.status), batch.integers[:, STATUS]),
        stop=put(state.stop, batch.stops),
        sampling=sampling,
        history=history,
        action=state.action._replace(temperature=put(state.action.temperature, numbers["temperature"])),
        cache=pool,
    )
    branch_state = device_state.branch_state
    if branch_state is not None:
        branches, token = batch.integers[:, BRANCHES], batch.integers[:, TOKEN]
        branch_state = branching.place_in_slots(branch_state, batch.freed_rows, slot, token, branches)
    gains = jnp.repeat(batch.gains, device_state.group, 0)
    return DeviceState(state, set_gains(device_state.controller, group, gains), branch_state)


def park(device_state: DeviceState, row: jax.Array) -> dict[str, Any]:
    """What a row has become beside its text: control, ledger, history. The board is not consumed."""
    row = row * device_state.group
    return jax.tree.map(lambda x: x[row], {name: getattr(device_state.state, name) for name in PARKED})


def unpark(device_state: DeviceState, row: jax.Array, parked: dict[str, Any]) -> DeviceState:
    """Make a row that was placed what it was when it was parked."""
    put = lambda x, y: x.at[row * device_state.group].set(y)
    return device_state._replace(
        state=device_state.state._replace(
            **{name: jax.tree.map(put, getattr(device_state.state, name), parked[name]) for name in PARKED}
        )
    )


def prefill(
    decoder: Any,
    params: Any,
    device_state: DeviceState,
    chunk: PrefillChunk,
    *,
    scored: bool,
    method: Method | None,
) -> tuple[DeviceState, PrefillOutput]:
    """Appends a chunk of some prompts to the KV cache; `chunk.rows` are slots. See `entropic_jax.prefill`.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        device_state: is consumed.
        chunk: the tokens, and the slots they belong to.
        scored: also return the log-probability of the token that follows each position.
        method: decides which earlier pages the chunk attends to; None attends to all.

    Returns:
        The device state, and what came of each prompt.
    """
    chunk = chunk._replace(rows=chunk.rows * device_state.group)
    state = device_state.state._replace(page_policy=method)
    state, output = loop.prefill(decoder, params, state, chunk, scored=scored)
    state = state._replace(page_policy=device_state.state.page_policy)
    return device_state._replace(state=state), output


def compress(
    device_state: DeviceState, row: jax.Array, *, method: Method | None
) -> tuple[DeviceState, jax.Array]:
    """Keep of a row what the method keeps; also returns its pages, and the positions it lost, int32 `[2]`."""
    assert method is not None  # who asks for it has looked
    row = row * device_state.group
    state = cache_compression.compress_row(device_state.state._replace(page_policy=method), row)
    found = jnp.stack([state.cache.granted[row], state.evicted[row]])
    return device_state._replace(state=state._replace(page_policy=device_state.state.page_policy)), found


def decode(
    decoder,
    params: Any,
    device_state: DeviceState,
    steps: jax.Array,
    constraints: Constraints,
    forced: jax.Array,
    prior: AR1,
    *,
    width: int,
    page_policy: PagePolicy | None,
    samples: bool,
    plan: Plan | None = None,
    exact: bool = False,
) -> tuple[DeviceState, DecodeOutput]:
    """Run up to `steps` steps of the first `width` running rows; `forced` is `[capacity, rows]`.

    `samples`: the engine's sampler draws for some of them, who search if there is a `plan`. `exact` as in
    `searching.launch`.
    """
    capacity, branch_state, k = forced.shape[0], device_state.branch_state, device_state.group
    state = device_state.state._replace(page_policy=page_policy)
    constraints, forced = jax.tree.map(lambda x: jnp.repeat(x, k, 0), constraints), jnp.repeat(forced, k, 1)

    def step(state: State, now: jax.Array, width: int | None = width) -> tuple[State, Trace]:
        controller = for_launch(device_state.controller, samples)
        return loop.step(
            decoder,
            params,
            controller,
            state,
            width=width,
            constraints=constraints._replace(forced=forced[now]),
        )

    if samples and plan is not None and branch_state is not None:
        branch_state, state, done, trace = branching.launch(
            step, branch_state, state, steps, plan, width, exact
        )
    else:
        state, done, trace = loop.run(step, state, steps, capacity)
        trace = jax.tree.map(lambda x: x[:, ::k], trace)
    lead = lambda x: jnp.copy(x[::k])
    tally = jnp.zeros(len(Tally._fields), jnp.int32)
    if branch_state is not None:
        branch_state, tally = branching.tallied(branch_state)
    output = DecodeOutput(
        count=trace.num_tokens,
        token=trace.token,
        metrics=jnp.stack([getattr(trace, name) for name in TRACE_FIELDS]),
        status=lead(state.status) if branch_state is None else branching.status(branch_state, state),
        length=lead(state.length + state.evicted),
        table=lead(state.cache.table),
        forecast=lead(predicted_drop(state.control[-1], prior)),
        steps=done,
        seconds=state.ledger.seconds.reshape(-1, k).sum(1),
        tally=tally,
        likeliest=trace.likeliest,
    )
    return DeviceState(
        state._replace(page_policy=device_state.state.page_policy), device_state.controller, branch_state
    ), output
