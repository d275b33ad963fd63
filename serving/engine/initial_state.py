"""Initial device state of an engine: empty rows, an empty page pool, every law switched off."""

from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax import State, allocate, loop, models, parameters
from entropic_jax.mesh import sharding
from entropic_jax.sampling.constraints import no_constraints

from .branching import new_branch_state
from .device_state import DeviceState
from .options import Sizes
from .row_controllers import RowControllers
from .state_updates import BIASES, STOPS


def initial_device_state(
    model: models.Model,
    sizes: Sizes,
    row_controllers: RowControllers,
    cache_dtype: Any,
    belief_temperature: float,
) -> DeviceState:
    """The device state of an engine without a sequence.

    Args:
        model: To be served.
        sizes: Of rows, pages and programs.
        row_controllers: Makes the rows' controller.
        cache_dtype: Of the KV cache, as `allocate` takes it.
        belief_temperature: T_cal, by which logits are divided before H₁ is measured.
    """
    decoder, shapes = model.decoder, sizes.shapes
    rows = sizes.rows * shapes.branches
    controller = row_controllers.controller(rows)
    laws = controller.for_launch(samples=True)
    pool = sharding.create(
        lambda: allocate(
            decoder.shape,
            rows,
            sizes.context,
            pages=sizes.pages,
            page_size=sizes.page_size,
            dtype=cache_dtype,
        ),
        model.mesh,
    )
    state = loop.start(
        decoder,
        model.params,
        laws,
        pool,
        [[]] * rows,
        key=jax.random.key(0),
        max_tokens=0,
        sample=parameters(rows, bias_slots=BIASES),
        stop=[[-1] * STOPS],
        belief_temperature=belief_temperature,
        speculator=shapes.speculator(rows),
    )
    if shapes.method is not None:
        # Programs consume the state, so no two leaves may share a buffer.
        memory = jax.tree.map(jnp.copy, shapes.method.memory(decoder.shape, state.cache))
        state = state._replace(page_policy_state=memory)
    if shapes.plan is None:
        return sharding.place(DeviceState(state, controller), model.mesh)

    def trace_of_step(state: State) -> Any:
        constraints = no_constraints(rows, decoder.shape.vocabulary)
        return loop.step(decoder, model.params, laws, state, constraints=constraints)[1]

    trace = jax.eval_shape(trace_of_step, state)
    return DeviceState(state, controller, new_branch_state(state, trace, shapes.plan, shapes.capacity))
