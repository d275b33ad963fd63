"""Device state of the engine and the four programs over it: apply_updates, prefill, decode and compress.

Each program consumes the `DeviceState` and returns a new one, so that its buffers are donated and updated in
place. `programs` compiles them for a few shapes; `scheduler` decides when to call them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from entropic_jax import State, Trace, loop
from entropic_jax.attention.page_selection import PagePolicy
from entropic_jax.control.entropy_drop import AR1, predicted_drop
from entropic_jax.methods import cache_compression
from entropic_jax.methods.entropix_branches import SearchCounts, SearchPlan
from entropic_jax.methods.method import Method
from entropic_jax.parameter_tables.sampling_params import DEVICE_PARAMETERS
from entropic_jax.phases.prefill import PrefillChunk, PrefillOutput
from entropic_jax.sampling import History
from entropic_jax.speculation import Speculator
from entropic_jax.state import FULL, PAUSED, ROW_FIELDS, RUNNING, TopLogprobs, cache
from entropic_jax.state.constraints import Constraints
from entropic_jax.state.row_subset import map_rows

from ..request.transcript import TRACE_FIELDS
from . import branching
from .branching import BranchState
from .row_controllers import RowController, set_gains

# Columns of `UpdateBatch.int_params` and of `UpdateBatch.float_params`. Integer sampling parameters come
# after the other integers of a placement.
INT_PARAMS = tuple(name for name, parameter in DEVICE_PARAMETERS.items() if parameter.accepts.kind is int)
FLOAT_PARAMS = tuple(name for name, parameter in DEVICE_PARAMETERS.items() if parameter.accepts.kind is float)
ROW, SEED, TOKEN, LIMIT, STATUS, NUM_SHARED, BRANCHES = range(7)
NUM_INTEGERS = 7 + len(INT_PARAMS)


Array = Any  # a NumPy array on the host, a JAX array in a program
SAVED_FIELDS = ("history", "measured", "action", "control", "ledger", "speculation")


class DeviceState(NamedTuple):
    """Everything on the device that changes: the state of the loop and the gains of the rows' controllers.

    The host's rows are branch groups: as many consecutive rows of `state` as a sequence may have branches,
    one unless the engine runs a branching sampler. The first row of a group leads it.
    """

    state: State
    controller: RowController
    branch_state: BranchState | None = None  # where sequences may branch

    @property
    def rows_per_group(self) -> int:
        """Rows of `state` that form one branch group."""
        if self.branch_state is None:
            return 1
        return self.state.status.shape[0] // self.branch_state.delivered.shape[0]


class UpdateBatch(NamedTuple):
    """Host-side changes to the device state, in arrays of fixed size: one compiled program applies them.

    They take effect in this order: pages are retained, rows freed, pages released, sequences placed. `s` is
    the number of branch groups, `k` the number of placements a batch holds, `m` the number of pages.
    """

    retained_pages: Array  # int32 [m], pages to which the prefix cache takes a reference
    freed_rows: Array  # bool [s], branch groups whose sequence has left
    released_pages: Array  # int32 [m], pages whose reference the prefix cache gives up
    int_params: Array  # int32 [k, NUM_INTEGERS]; ROW is s where there is no placement
    float_params: Array  # float32 [k, len(FLOAT_PARAMS)]
    stop_tokens: Array  # int32 [k, STOPS], -1 where unused
    bias_tokens: Array  # int32 [k, BIASES], -1 where unused
    bias_values: Array  # float32 [k, BIASES]
    shared_pages: Array  # int32 [k, pages per row], of which the first NUM_SHARED are shared with others
    gains: Array  # float32 [k, n], gains and switches of the row's controllers
    # The penalties' history, in the batches that place rows with penalties.
    prompt_history: Array | None = None  # bool [k, vocabulary]
    generated_history: Array | None = None  # int32 [k, vocabulary]
    latest_history: Array | None = None  # int32 [k, window + 1]: the latest tokens, and the number of all
    text: Array | None = None  # int32 [k, context + 1], tokens by position, where drafters read them
    adapter: Array | None = None  # int32 [k], LoRA adapters, where the model has any


class DecodeOutput(NamedTuple):
    """The result of one launch; the tokens of branch group r are the first `num_tokens[r]` of n."""

    num_tokens: jax.Array  # int32 [s]
    # int32 [n, s]; n is the tokens that the capacity allows, plus those that branches may hold back
    token: jax.Array
    metrics: jax.Array  # float32 [len(TRACE_FIELDS), n, s]
    status: jax.Array  # int32 [s]
    length: jax.Array  # int32 [s], positions of the text, those evicted from the cache included
    table: jax.Array  # int32 [s, pages per row], the page tables
    expected_drop: jax.Array  # float32 [s], E[ΔH⁺] of the next token, nats
    num_steps: jax.Array  # int32 [], steps that ran
    cost: jax.Array  # float32 [s], roofline seconds of the sequence so far, all branches included
    tally: jax.Array  # int32 [len(SearchCounts)], counts of the branching sampler
    top_logprobs: TopLogprobs | tuple[()]  # [n, s, ...]


def apply_updates(blank: State, device_state: DeviceState, batch: UpdateBatch) -> DeviceState:
    """Apply a batch of host-side changes.

    Args:
        blank: the state of one empty row.
        device_state: consumed.
        batch: the changes, of fixed size.
    """
    state, group = device_state.state, device_state.rows_per_group
    branch_group = batch.int_params[:, ROW]
    row, group_rows = branch_group * group, (branch_group[:, None] * group + jnp.arange(group)).reshape(-1)
    freed = jnp.repeat(batch.freed_rows, group)
    pool = cache.retain(state.cache, batch.retained_pages)
    pool = cache.release_rows(pool, freed)
    pool = cache.release(pool, batch.released_pages)
    pool = cache.share_pages(pool, row, batch.shared_pages, batch.int_params[:, NUM_SHARED])
    state = _clear(state._replace(cache=pool), blank, group_rows)
    state = _place(state._replace(status=jnp.where(freed, FULL, state.status)), row, batch)
    branch_state = device_state.branch_state
    if branch_state is not None:
        branches, token = batch.int_params[:, BRANCHES], batch.int_params[:, TOKEN]
        branch_state = branching.assign_groups(branch_state, batch.freed_rows, branch_group, token, branches)
    gains = jnp.repeat(batch.gains, group, 0)
    return DeviceState(state, set_gains(device_state.controller, group_rows, gains), branch_state)


def _clear(state: State, blank: State, rows: jax.Array) -> State:
    """The state with `rows` int32 `[n]` as in `blank`, all but the cache; rows past the last are ignored."""
    total = state.status.shape[0]
    cleared = jnp.zeros(total, bool).at[rows].set(True, mode="drop")

    def clear(old, new):
        return jnp.where(cleared.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    fields = {name: map_rows(clear, getattr(state, name), getattr(blank, name)) for name in ROW_FIELDS}
    return state._replace(**fields)


def _place(state: State, row: jax.Array, batch: UpdateBatch) -> State:
    """The state with the batch's placements in rows int32 `[k]`; rows past the last are ignored."""

    def put(array, values):
        return array.at[row].set(values.astype(array.dtype), mode="drop")

    params = {name: batch.float_params[:, i] for i, name in enumerate(FLOAT_PARAMS)}
    params |= {name: batch.int_params[:, i] for i, name in enumerate(INT_PARAMS, BRANCHES + 1)}
    sampling = state.sampling._replace(
        **{name: put(getattr(state.sampling, name), values) for name, values in params.items()},
        bias_tokens=put(state.sampling.bias_tokens, batch.bias_tokens),
        bias_values=put(state.sampling.bias_values, batch.bias_values),
    )
    history = state.history
    if (
        batch.prompt_history is not None
        and batch.generated_history is not None
        and batch.latest_history is not None
    ):
        history = History(
            prompt=put(history.prompt, batch.prompt_history),
            generated=put(history.generated, batch.generated_history),
            latest=put(history.latest, batch.latest_history[:, :-1]),
            number=put(history.number, batch.latest_history[:, -1]),
        )
    text = state.text
    if text is not None:
        text = put(text, batch.text)
    adapter = state.adapter
    if adapter is not None:
        adapter = put(adapter, batch.adapter)
    return state._replace(
        text=text,
        adapter=adapter,
        seed=put(state.seed, batch.int_params[:, SEED]),
        token=put(state.token, batch.int_params[:, TOKEN]),
        length=put(state.length, batch.int_params[:, NUM_SHARED] * state.cache.page_size),
        limit=put(state.limit, batch.int_params[:, LIMIT]),
        status=put(state.status, batch.int_params[:, STATUS]),
        stop=put(state.stop, batch.stop_tokens),
        sampling=sampling,
        history=history,
        action=state.action._replace(temperature=put(state.action.temperature, params["temperature"])),
    )


def save_row(device_state: DeviceState, row: jax.Array) -> dict[str, Any]:
    """Control state, ledger and history of a group whose sequence will be preempted. Consumes nothing."""
    row = row * device_state.rows_per_group
    return map_rows(lambda x: x[row], {name: getattr(device_state.state, name) for name in SAVED_FIELDS})


def restore_row(device_state: DeviceState, row: jax.Array, saved: dict[str, Any]) -> DeviceState:
    """Give a branch group, in which its sequence was placed again, what `save_row` has saved.

    Args:
        device_state: consumed.
        row: int32 `[]`, the branch group.
        saved: from `save_row`.
    """
    row, state = row * device_state.rows_per_group, device_state.state

    def put(values, saved_value):
        return values.at[row].set(saved_value)

    fields = {name: map_rows(put, getattr(state, name), saved[name]) for name in SAVED_FIELDS}
    return device_state._replace(state=state._replace(**fields))


def prefill(
    decoder: Any,
    params: Any,
    device_state: DeviceState,
    chunk: PrefillChunk,
    *,
    scored: bool,
    method: Method | None,
) -> tuple[DeviceState, PrefillOutput]:
    """Append a chunk of some prompts to the KV cache; `chunk.rows` are branch groups. See `phases.prefill`.

    Args:
        decoder: the model's pure functions.
        params: its parameters.
        device_state: consumed.
        chunk: the tokens, and the branch groups they belong to.
        scored: whether to compute the log-probability of the token that follows each position; static.
        method: selects the earlier pages that the chunk attends to, None for all; static.

    Returns:
        The new device state, and the result for each prompt.
    """
    chunk = chunk._replace(rows=chunk.rows * device_state.rows_per_group)
    state = device_state.state._replace(page_policy=method)
    state, output = loop.prefill(decoder, params, state, chunk, scored=scored)
    state = state._replace(page_policy=device_state.state.page_policy)
    return device_state._replace(state=state), output


def compress(
    device_state: DeviceState, row: jax.Array, *, method: Method | None
) -> tuple[DeviceState, jax.Array]:
    """Evict from a branch group's KV cache what the method does not keep.

    Returns the new device state, and int32 `[2]`: pages that the group holds now, and positions evicted.

    Args:
        device_state: consumed.
        row: int32 `[]`, the branch group.
        method: whose compression applies; static.
    """
    assert method is not None  # the scheduler compresses only where there is a method
    row = row * device_state.rows_per_group
    policy = device_state.state.page_policy
    state = cache_compression.compress_row(device_state.state._replace(page_policy=method), row)
    counts = jnp.stack([state.cache.granted[row], state.evicted[row]])
    return device_state._replace(state=state._replace(page_policy=policy)), counts


def decode(
    decoder: Any,
    params: Any,
    device_state: DeviceState,
    steps: jax.Array,
    constraints: Constraints,
    forced: jax.Array,
    held: jax.Array,
    prior: AR1,
    speculator: Speculator | None = None,
    *,
    width: int,
    page_policy: PagePolicy | None,
    samples: bool,
    plan: SearchPlan | None = None,
    exact: bool = False,
) -> tuple[DeviceState, DecodeOutput]:
    """Run one launch: up to `steps` decode steps of the running rows.

    Args:
        decoder: the model's forward pass.
        params: its weights.
        device_state: consumed.
        steps: int32 `[]`, at most the capacity.
        constraints: constraints of each branch group for all steps, without the forced tokens.
        forced: int32 `[capacity, groups]`, the token that each step must emit, -1 where it samples.
        held: bool `[groups]`, those that take no part in the launch.
        prior: the prior of H₁ along a sequence, for the expected drop.
        speculator: drafts tokens, so that a step may emit several; None decodes one by one.
        width: branch groups that a step computes, static; the first `width` that run.
        page_policy: the choice of pages that the steps read, None for all; static.
        samples: whether the engine's sampler draws the tokens of some rows; static.
        plan: how sequences branch, None where none does; static.
        exact: as in `branching.launch`; static.

    Returns:
        The new device state and what the launch emitted.
    """
    capacity, group, policy = forced.shape[0], device_state.rows_per_group, device_state.state.page_policy
    branch_state, state = device_state.branch_state, device_state.state._replace(page_policy=page_policy)
    constraints = map_rows(lambda x: jnp.repeat(x, group, 0), constraints)
    constraints = constraints._replace(start=state.length + state.evicted + 1)
    forced = jnp.repeat(forced, group, 1)
    waits = jnp.repeat(held, group) & (state.status == RUNNING)
    state = state._replace(status=jnp.where(waits, PAUSED, state.status))

    controller = device_state.controller.for_launch(samples)

    def step(state: State, index: jax.Array, width: int | None = width) -> tuple[State, Trace]:
        step_constraints = constraints._replace(forced=forced[index])
        return loop.step(decoder, params, controller, state, width=width, constraints=step_constraints)

    def drafting(state: State, index: jax.Array, width: int | None = width) -> tuple[State, Trace]:
        assert speculator is not None, "only launches with one draft"
        step_constraints = constraints._replace(forced=forced[index])
        return loop.speculative_step(decoder, params, controller, speculator, state, width, step_constraints)

    advance = step if speculator is None else drafting
    if samples and plan is not None and branch_state is not None:
        # Its launches have one step if any row is masked, so a row that pauses need not wait.
        resuming = lambda *arguments: _resume(*advance(*arguments))
        branch_state, state, num_steps, trace = branching.launch(
            resuming, branch_state, state, steps, plan, width, exact
        )
    else:
        resting = None if speculator is None else loop.resting(step, constraints)
        state, num_steps, trace = loop.run(advance, state, steps, capacity, resting)
        state, trace = _resume(state, trace)
        trace = jax.tree.map(lambda x: x[:, ::group], trace)
    if speculator is not None:  # pages granted for drafts that were not accepted go back to the pool
        state = state._replace(cache=cache.shrink(state.cache, state.length))
    tally = jnp.zeros(len(SearchCounts._fields), jnp.int32)
    if branch_state is not None:
        branch_state, tally = branching.take_tally(branch_state)
    device_state = DeviceState(state, device_state.controller, branch_state)
    output = _output(device_state, trace, num_steps, tally, prior)
    return device_state._replace(state=state._replace(page_policy=policy)), output


def _resume(state: State, trace: Trace) -> tuple[State, Trace]:
    """The same with the rows that have paused running again."""
    return state._replace(status=jnp.where(state.status == PAUSED, RUNNING, state.status)), trace


def _output(
    device_state: DeviceState, trace: Trace, num_steps: jax.Array, tally: jax.Array, prior: AR1
) -> DecodeOutput:
    state, branch_state, group = device_state.state, device_state.branch_state, device_state.rows_per_group

    def leading(values: jax.Array) -> jax.Array:
        return jnp.copy(values[::group])

    return DecodeOutput(
        num_tokens=trace.num_tokens,
        token=trace.token,
        metrics=jnp.stack([getattr(trace, name).astype(jnp.float32) for name in TRACE_FIELDS]),
        status=leading(state.status) if branch_state is None else branching.status(branch_state, state),
        length=leading(state.length + state.evicted),
        table=leading(state.cache.table),
        expected_drop=leading(predicted_drop(state.control[-1], prior)),
        num_steps=num_steps,
        cost=state.ledger.seconds.reshape(-1, group).sum(1),
        tally=tally,
        top_logprobs=trace.top_logprobs,
    )
