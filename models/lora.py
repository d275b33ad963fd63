"""LoRA adapters: low-rank updates of linear layers, of which each row of a batch may have its own.

    y = x W + scale · (x A[adapter]) B[adapter]

A and B of all adapters are stacked, with room for a fixed number of adapters of a fixed rank, and are part of
the parameters: which adapter a row has, and what is in a slot, are values that programs read, so loading an
adapter compiles nothing. Adapters of a lower rank are padded with zeros. The scale is multiplied into B.
Adapter 0 is none: such rows keep the bits of the layer's output.

Source: Hu et al. 2021 (arXiv 2106.09685); scale α/r, or α/√r as in Kalajdzievski 2023 (arXiv 2312.03732).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from entropic_jax.cache import ModelShape

from .block_spec import AttentionSpec, MLPSpec
from .config import Config, ModelError
from .decoder import Decoder, Params, blocks, structure
from .layers import Attend

BLOCKS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ("self_attn", AttentionSpec)),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ("mlp", MLPSpec)),
}
"""The linear layers that adapters may update: their block, and the kind of block that has them."""


class Target(NamedTuple):
    """A linear layer of the same name and size in several decoder layers."""

    layers: tuple[int, ...]  # that have it
    inputs: int
    outputs: int


class Factors(NamedTuple):
    """A and B of one linear layer, for all decoder layers that have it.

    Of one adapter; or of all, with the slot as first axis.
    """

    a: Any  # [layers, inputs, rank]
    b: Any  # [layers, rank, outputs], times the scale


Adapters = Mapping[str, Factors]
"""By the names in `BLOCKS`."""


class LoraParams(NamedTuple):
    """The parameters of a model, and the adapters in their slots."""

    model: Params
    adapters: Adapters


def targets(config: Config) -> dict[str, Target]:
    """The linear layers that adapters may update. Raises ModelError if layers differ in their size."""
    params, result = structure(config)[1], {}
    for name, (block, kind) in BLOCKS.items():
        specs = [layer.attention if block == "self_attn" else layer.mlp for layer in blocks(config)]
        kernels = {
            number: params["layers"][number][block][name]["kernel"].shape
            for number, spec in enumerate(specs)
            if isinstance(spec, kind) and name in params["layers"][number][block]
        }
        if len(set(kernels.values())) > 1:
            raise ModelError(f"{name} must have one size in all layers for adapters; {config.architecture}")
        if kernels:
            result[name] = Target(tuple(kernels), *next(iter(kernels.values())))
    return result


def empty_adapters(config: Config, slots: int, rank: int, dtype: Any) -> Adapters:
    """Slots without an adapter: zeros.

    Args:
        config: the model's configuration.
        slots: number of adapters that there is room for.
        rank: largest rank of an adapter.
        dtype: the dtype that the model computes in.
    """
    return {
        name: Factors(
            jnp.zeros((slots, len(target.layers), target.inputs, rank), dtype),
            jnp.zeros((slots, len(target.layers), rank, target.outputs), dtype),
        )
        for name, target in targets(config).items()
    }


def install(adapters: Adapters, slot: jax.Array, adapter: Adapters) -> Adapters:
    """The adapters with another one in a slot.

    Args:
        adapters: those of all slots.
        slot: int32 `[]`.
        adapter: the new one, every target with its factors; see `lora_files`.
    """
    put = lambda stacked, new: stacked.at[slot].set(new.astype(stacked.dtype))
    return jax.tree.map(put, adapters, adapter)


class RowUpdate(NamedTuple):
    """The update of one linear layer in each row of a pass; see `layers.LowRankUpdate`."""

    a: jax.Array  # [slots, layers, inputs, rank]
    b: jax.Array  # [slots, layers, rank, outputs]
    layer: int  # place on the second axis
    adapter: jax.Array  # int32 [rows], 0 for none; adapter i is in slot i − 1

    def added(self, outputs: jax.Array, x: jax.Array) -> jax.Array:
        """The outputs `[rows, n, outputs]` of x `[rows, n, inputs]` under each row's adapter."""
        slot = jnp.maximum(self.adapter - 1, 0)
        a, b = self.a[slot, self.layer], self.b[slot, self.layer]
        update = jnp.matmul(jnp.matmul(x, a), b)
        return jnp.where((self.adapter > 0)[:, None, None], outputs + update, outputs)


@dataclasses.dataclass(frozen=True)
class LoraDecoder:
    """The functions of a model whose rows may each have an adapter: static and hashable, as `Decoder`."""

    decoder: Decoder

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.decoder.shape

    @property
    def windows(self) -> tuple[int | None, ...]:
        """As in `Decoder`."""
        return self.decoder.windows

    @property
    def mesh(self) -> Mesh | None:
        """None: adapters are not divided over devices."""
        return None

    def context_key(self, length: int) -> tuple[int, ...]:
        """As in `Decoder`."""
        return self.decoder.context_key(length)

    def hidden(
        self,
        params: LoraParams,
        tokens: jax.Array,
        positions: jax.Array,
        layers: tuple[Any, ...],
        attend: Attend,
        lengths: jax.Array | None = None,
        adapter: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Hidden states after the last norm, and the caches as `attend` returned them.

        Args:
            params: the parameters of the model and the adapters.
            tokens: int32 `[rows, n]`.
            positions: int32 `[rows, n]`.
            layers: one cache per layer, passed to `attend`.
            attend: attention and cache update.
            lengths: as in `Decoder.hidden`.
            adapter: int32 `[rows]`, 0 for none; None where no row has one.
        """
        module: Any = self.decoder.module(params.model)
        if adapter is not None:
            for name, target in targets(self.decoder.config).items():
                a, b = params.adapters[name]
                for place, number in enumerate(target.layers):
                    linear = getattr(getattr(module.layers[number], BLOCKS[name][0]), name)
                    linear.low_rank = RowUpdate(a, b, place, adapter)
        return module(tokens, positions, layers, attend, lengths)

    def logits(self, params: LoraParams, hidden: jax.Array) -> jax.Array:
        """Logits, float32 `[..., vocabulary]`, of hidden states `[..., hidden]`."""
        return self.decoder.logits(params.model, hidden)


def without_adapters(decoder: Any, params: Any) -> tuple[Any, Any]:
    """A model's functions and parameters without those of adapters, if they have any."""
    return (decoder.decoder, params.model) if isinstance(decoder, LoraDecoder) else (decoder, params)


def zero_factors(config: Config, rank: int) -> dict[str, Factors]:
    """An adapter that changes nothing, in float32 on the host, to be filled.

    Args:
        config: the model's configuration.
        rank: its rank.
    """
    return {
        name: Factors(
            np.zeros((len(target.layers), target.inputs, rank), np.float32),
            np.zeros((len(target.layers), rank, target.outputs), np.float32),
        )
        for name, target in targets(config).items()
    }
