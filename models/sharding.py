"""Sharding of a model's parameters over the tensor axis of a mesh: a PartitionSpec for each array.

Heads, feed-forward blocks and the vocabulary are divided. A pass needs two sums over the axis per layer,
after the output projection of the attention and after that of the feed-forward block, one sum for the
embedding, and one gathering of the logits.

Source: Shoeybi et al., Megatron-LM (2019; arXiv 1909.08053), section 3.
"""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from entropic_jax.mesh import AXES, DATA, EXPERT, TENSOR

from .block_spec import BlockSpec, ExpertsSpec, LatentAttentionSpec
from .config import Config, ModelError
from .families import FAMILIES

# Modules whose matrices [in, out] are divided by outputs, and those divided by inputs.
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROW_PARALLEL = ("o_proj", "down_proj")
VOCABULARY_PARALLEL = ("embed_tokens",)
# Modules whose arrays every device has: norms of one vector, and the router of experts. So has every module
# whose name ends with NORM.
REPLICATED = ("norm", "q_norm", "k_norm", "gate", "attention_output_norm", "mlp_output_norm", "act_fn")
NORM = "layernorm"


def partition_spec(path: tuple[Any, ...], ndim: int) -> P:
    """The PartitionSpec of a parameter.

    Args:
        path: the path of the array in `Params`.
        ndim: axes of the array; a matrix per expert has three.

    Raises:
        ModelError: the module is not in the lists above.
    """
    module, kind = path[-2], path[-1]
    if module in VOCABULARY_PARALLEL:
        return P(TENSOR)
    if module in COLUMN_PARALLEL:
        return P(*(None,) * (ndim - 1), TENSOR)
    if module in ROW_PARALLEL and kind == "kernel":
        return P(*(None,) * (ndim - 2), TENSOR, None)
    # A vector that is added after the sum over the devices, or that every device needs.
    if (ndim == 1 and module in (*ROW_PARALLEL, *REPLICATED)) or str(module).endswith(NORM):
        return P()
    if module in ("gate", "shared_expert_gate") and kind == "kernel":
        return P()
    name = ".".join(map(str, path))
    raise ModelError(f"mesh must be None for a model with {name}, which programs on a mesh cannot divide yet")


def partition_specs(shapes: Any) -> Any:
    """The PartitionSpec of every array of a model's `Params`."""

    def spec(path: tuple[Any, ...], x: Any) -> P:
        return partition_spec(tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path), x.ndim)

    return jax.tree_util.tree_map_with_path(spec, shapes)


def shardings(shapes: Any, mesh: Mesh) -> Any:
    """The NamedSharding of every array of a model's `Params`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), partition_specs(shapes))


def check_mesh(config: Config, mesh: Mesh) -> None:
    """Raise ModelError, naming what does not fit, unless the model can be divided over the mesh."""
    if mesh.axis_names != AXES:
        raise ModelError(f"mesh must have the axes {', '.join(AXES)}; got {', '.join(mesh.axis_names)}")
    for axis in (DATA, EXPERT):
        if mesh.shape[axis] > 1:
            raise ModelError(f"mesh must have one device along {axis}; got {mesh.shape[axis]}")
    check_sizes(config, mesh.shape[TENSOR])


def check_sizes(config: Config, size: int) -> None:
    """Raise ModelError unless `size` devices divide the heads, the feed-forward blocks and the vocabulary."""
    divided = {
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    if config.num_local_experts:
        divided["moe_intermediate_size"] = config.moe_intermediate_size
    family = FAMILIES[config.architecture]
    reasons = (undivided(family.block(config, layer)) for layer in range(config.num_hidden_layers))
    reason = next(filter(None, reasons), None)
    if size > 1 and reason is not None:
        raise ModelError(f"tensor_parallel_size must be 1 for {config.architecture}: {reason}; got {size}")
    for name, value in divided.items():
        if value % size:
            raise ModelError(f"tensor_parallel_size must divide {name}, {value}; got {size}")


def undivided(block: BlockSpec) -> str | None:
    """Why a layer cannot be divided over the tensor axis; None if it can."""
    attention, mlp = block.attention, block.mlp
    if isinstance(attention, LatentAttentionSpec):
        return "all heads share one latent vector"
    if attention.sinks:
        return "attention sinks are not divided"
    if attention.head_norm is not None and attention.norm_span != "head":
        return "the norms of queries and keys span several heads"
    if isinstance(mlp, ExpertsSpec) and mlp.bias:
        return "biases of experts are not divided"
    return None
