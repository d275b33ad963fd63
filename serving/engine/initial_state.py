"""Initial device state of an engine: empty rows, an empty page pool, every law switched off."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import State, allocate, loop, models, parameters
from entropic_jax.mesh import sharding
from entropic_jax.models.lora import LoraDecoder
from entropic_jax.speculation import HeadedDecoder
from entropic_jax.state.constraints import no_constraints

from ..executable_cache import load_or_compile
from .branching import new_branch_state
from .device_state import DeviceState
from .options import Sizes
from .row_controllers import RowController, RowControllers
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
        model: the model to serve.
        sizes: the sizes of rows, pages and programs.
        row_controllers: makes the rows' controller.
        cache_dtype: the dtype of the KV cache, as `allocate` takes it.
        belief_temperature: T_cal, by which logits are divided before H₁ is measured.
    """
    controller = row_controllers.controller(sizes.rows * sizes.shapes.branches)
    create = partial(_new_device_state, model.decoder, sizes, cache_dtype)
    # One program, because hundreds of small ones would be compiled, or loaded, one after the other.
    if model.mesh is None:
        arguments = model.params, controller, np.float32(belief_temperature)
        return load_or_compile(create, arguments)[0](*arguments)
    # From host arrays, of which each process of a mesh puts its part on its devices.
    arguments = model.params, jax.tree.map(np.asarray, controller), np.float32(belief_temperature)
    divided = sharding.shardings(jax.eval_shape(create, *arguments), model.mesh)
    return jax.jit(create, out_shardings=divided)(*arguments)


def _new_device_state(
    decoder: Any,
    sizes: Sizes,
    cache_dtype: Any,
    params: Any,
    controller: RowController,
    belief_temperature: Any,
) -> DeviceState:
    """See `initial_device_state`.

    Args:
        decoder: the model's pure functions.
        sizes: the sizes of rows, pages and programs.
        cache_dtype: the dtype of the KV cache.
        params: the parameters of the model.
        controller: the controller of all rows.
        belief_temperature: T_cal.
    """
    mesh, shapes = getattr(decoder, "mesh", None), sizes.shapes
    rows, drafting = sizes.rows * shapes.branches, shapes.drafting_widths
    headed = isinstance(decoder, HeadedDecoder)
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
        mesh,
    )
    state = loop.start(
        decoder,
        params,
        laws,
        pool,
        [[]] * rows,
        key=jax.random.key(0),
        max_tokens=0,
        sample=parameters(rows, bias_slots=BIASES),
        stop=[[-1] * STOPS] * rows,
        belief_temperature=belief_temperature,
        # Any bucket's: what it adds to the state has an entry for each row, also of larger batches.
        speculator=shapes.speculator(drafting[0], headed=headed) if drafting else None,
    )
    if isinstance(decoder, LoraDecoder):
        state = state._replace(adapter=jnp.zeros(rows, jnp.int32))
    if shapes.method is not None:
        # Programs consume the state, so no two leaves may share a buffer.
        memory = jax.tree.map(jnp.copy, shapes.method.memory(decoder.shape, state.cache))
        state = state._replace(page_policy_state=memory)
    if shapes.plan is None:
        return sharding.place(DeviceState(state, controller), mesh)

    def trace_of_step(state: State) -> Any:
        constraints = no_constraints(rows, decoder.shape.vocabulary)
        return loop.step(decoder, params, laws, state, constraints=constraints)[1]

    trace = jax.eval_shape(trace_of_step, state)
    return DeviceState(state, controller, new_branch_state(state, trace, shapes.plan, shapes.capacity))
