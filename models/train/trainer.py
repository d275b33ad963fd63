"""The state of a training run: parameters, their average, the optimiser, and checkpoints of all three.

The trainer keeps the layers stacked, one array `[layers, …]` for each matrix. The optimiser's state and its
work (Newton–Schulz iterations, for Muon) are then split over the devices by layer, while every device holds
all parameters.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from . import forward
from .shape import Shape


def initialise(shape: Shape, seed: int) -> forward.Params:
    """Random parameters; projections into the residual stream start at zero."""
    rng = np.random.default_rng(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim

    experts = (shape.num_local_experts,) if shape.num_local_experts else ()

    def normal(*size):
        return (rng.standard_normal(size) * size[-2] ** -0.5).astype(np.float32)

    def layer() -> dict[str, np.ndarray]:
        return {
            "input_layernorm": np.ones(hidden, np.float32),
            "q_proj": normal(hidden, q),
            "k_proj": normal(hidden, kv),
            "v_proj": normal(hidden, kv),
            "o_proj": np.zeros((q, hidden), np.float32),
            "post_attention_layernorm": np.ones(hidden, np.float32),
            **({"router": normal(hidden, *experts)} if experts else {}),
            "gate_proj": normal(*experts, hidden, inner),
            "up_proj": normal(*experts, hidden, inner),
            "down_proj": np.zeros((*experts, inner, hidden), np.float32),
        }

    embedding = rng.standard_normal((shape.vocab_size, hidden)).astype(np.float32) * 0.02
    return {
        "embed_tokens": embedding,
        "layers": [layer() for _ in range(shape.num_hidden_layers)],
        "norm": np.ones(hidden, np.float32),
    }


def stack(params: forward.Params) -> forward.Params:
    """Parameters with one array `[layers, …]` for each matrix, from a list of layers."""
    layers = params["layers"]
    return {**params, "layers": {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}}


def unstack(params: forward.Params) -> forward.Params:
    """The inverse of `stack`."""
    layers = params["layers"]
    count = len(layers["q_proj"])
    return {**params, "layers": [{name: x[i] for name, x in layers.items()} for i in range(count)]}


def optimiser(name: str, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Muon for the matrices of the layers and Adam for the rest, or AdamW for all, of stacked parameters."""
    if name == "adamw":
        rule = optax.adamw(lambda s: 0.15 * schedule(s), b2=0.98, weight_decay=0.1)
    else:

        def matrices(params):
            spec = optax.contrib.MuonDimensionNumbers((-2,), (-1,))
            return jax.tree.map(lambda x: spec if x.ndim >= 3 else None, params)

        rule = optax.contrib.muon(
            schedule,
            weight_decay=0.01,
            adam_learning_rate=lambda s: 0.2 * schedule(s),
            adam_b2=0.98,
            muon_weight_dimension_numbers=matrices,
        )
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def _by_layer(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shardings that split stacked matrices over the devices by layer, and nothing else."""

    def spec(x):
        return P("data") if x.ndim >= 3 and x.shape[0] % mesh.size == 0 else P()

    return jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree)


def _make_step(shape: Shape, rule: optax.GradientTransformation, mesh: jax.sharding.Mesh):
    """One update from tokens `[passes, device rows, time + 1]`: accumulate over the passes, then average."""

    def gradients(params, tokens, weights):
        params = unstack(params)

        def one_pass(carry, xs):
            (loss, plain), g = jax.value_and_grad(forward.loss, has_aux=True)(params, *xs, shape)
            return jax.tree.map(jnp.add, carry, (g, loss, plain)), None

        zero = jax.tree.map(jnp.zeros_like, params)
        (g, loss, plain), _ = jax.lax.scan(one_pass, (zero, 0.0, 0.0), (tokens, weights))
        return jax.lax.psum((stack(g), loss, plain, weights.sum()), "data")

    sharded = jax.shard_map(
        gradients, mesh=mesh, in_specs=(P(), P(None, "data"), P(None, "data")), out_specs=P(), check_vma=False
    )
    everywhere = NamedSharding(mesh, P())

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, average, state, tokens, weights, average_weight):
        g, loss, plain, total = sharded(params, tokens, weights)
        g = jax.lax.with_sharding_constraint(jax.tree.map(lambda x: x / total, g), _by_layer(g, mesh))
        updates, state = rule.update(g, state, params)
        updates = jax.lax.with_sharding_constraint(updates, everywhere)
        state = jax.lax.with_sharding_constraint(state, _by_layer(state, mesh))
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, average_weight)
        return params, average, state, plain / weights.size, optax.global_norm(g)

    return step


class Trainer:
    """Parameters, their average and the optimiser's state on the devices, with their checkpoints.

    Args:
        work: folder of the checkpoints.
        shape: the model's shape.
        rule: the optimiser.
        params: initial parameters.
        keep: checkpoints of multiples of this step are never deleted.
    """

    def __init__(
        self, work: Path, shape: Shape, rule: optax.GradientTransformation, params: Any, keep: int
    ) -> None:
        self.mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        everywhere = NamedSharding(self.mesh, P())
        self.params = jax.device_put(stack(params), everywhere)
        self.average = jax.tree.map(jnp.copy, self.params)
        shardings = _by_layer(jax.eval_shape(rule.init, self.params), self.mesh)
        self.state = jax.jit(rule.init, out_shardings=shardings)(self.params)
        options = ocp.CheckpointManagerOptions(max_to_keep=3, keep_period=keep)
        self.manager = ocp.CheckpointManager(work / "checkpoints", options=options)
        self.first = self.manager.latest_step() or 0
        if self.first:
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self._tree())
            restored = self.manager.restore(self.first, args=ocp.args.StandardRestore(target))
            self.params, self.average, self.state = (restored[k] for k in ("params", "average", "state"))
        self._step = _make_step(shape, rule, self.mesh)

    def _tree(self) -> dict[str, Any]:
        return {"params": self.params, "average": self.average, "state": self.state}

    def save(self, step: int) -> None:
        """Write a checkpoint in the background."""
        if step != self.manager.latest_step():
            self.manager.save(step, args=ocp.args.StandardSave(self._tree()))

    def update(
        self, tokens: np.ndarray, weights: np.ndarray, passes: int, average_weight: float
    ) -> tuple[float, float]:
        """Take one step; returns the loss in nats per token and the norm of the gradient.

        Args:
            tokens: `[windows, length + 1]`.
            weights: `[windows, length]`.
            passes: the number of passes that the windows are split into.
            average_weight: share of the new parameters in the average.
        """
        sharding = NamedSharding(self.mesh, P(None, "data"))
        split = (jax.device_put(x.reshape(passes, len(x) // passes, -1), sharding) for x in (tokens, weights))
        self.params, self.average, self.state, nats, norm = self._step(
            self.params, self.average, self.state, *split, average_weight
        )
        return float(nats), float(norm)
