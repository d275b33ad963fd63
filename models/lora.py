"""LoRA adapters: low-rank updates of linear layers, of which each row of a batch may have its own.

    y = x W + scale · (x A[adapter]) B[adapter]

A and B of all adapters are stacked, with room for a fixed number of adapters of a fixed rank, and are part of
the parameters: which adapter a row has, and what is in a slot, are values that programs read, so loading an
adapter compiles nothing. Adapters of a lower rank are padded with zeros. The scale is multiplied into B.
Linear layers that multiply the same x are updated together, with their A side by side.
Adapter 0 means no adapter: the layer's outputs for such rows keep their bits.

On a CPU, a pass computes the update of each adapter that some row has, over all rows, and selects. A pass in
which no row has an adapter computes none. Elsewhere the factors of each row are gathered.

Source: Hu et al. 2021 (arXiv 2106.09685); scale α/r, or α/√r as in Kalajdzievski 2023 (arXiv 2312.03732).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from entropic_jax.mesh.devices import default_device
from entropic_jax.pallas.skinny_matmul import skinny_matmul
from entropic_jax.state.cache import ModelShape

from .block_spec import AttentionSpec, MLPSpec
from .config import Config, ModelError
from .decoder import Decoder, Params, blocks, structure
from .layers import Attend

BLOCKS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), ("self_attn", AttentionSpec)),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ("mlp", MLPSpec)),
}
"""The linear layers that adapters may update: their block, and the kind of block that has them."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Groups of matrices that multiply the same x; see `layers.fused_linear`."""


class Target(NamedTuple):
    """A linear layer of the same name and size in several decoder layers."""

    layers: tuple[int, ...]  # that have it
    inputs: int
    outputs: int


class Factors(NamedTuple):
    """A and B of one linear layer of an adapter, for all decoder layers that have it, on the host."""

    a: Any  # [layers, inputs, rank]
    b: Any  # [layers, rank, outputs], times the scale


class Site(NamedTuple):
    """Linear layers of a decoder layer that are updated together."""

    layer: int
    block: str
    names: tuple[str, ...]


class StackedFactors(NamedTuple):
    """A and B of the linear layers of a site, of all adapters."""

    a: Any  # [slots, inputs, layers · rank]
    b: tuple[Any, ...]  # of each layer, [slots, rank, outputs], times the scale


Adapters = tuple[StackedFactors, ...]
"""The adapters in their slots, by the order of `sites`."""


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


def sites(config: Config) -> tuple[Site, ...]:
    """The linear layers that adapters may update, grouped by the input that they share."""
    layers_of = {name: target.layers for name, target in targets(config).items()}
    return tuple(
        Site(number, BLOCKS[present[0]][0], present)
        for number in range(config.num_hidden_layers)
        for names in FUSED
        if (present := tuple(name for name in names if number in layers_of.get(name, ())))
    )


def empty_adapters(config: Config, slots: int, rank: int, dtype: Any) -> Adapters:
    """Slots without an adapter: zeros.

    Args:
        config: the model's configuration.
        slots: number of adapters that there is room for.
        rank: largest rank of an adapter.
        dtype: the dtype that the model computes in.
    """
    sizes = targets(config)
    return tuple(
        StackedFactors(
            jnp.zeros((slots, sizes[site.names[0]].inputs, len(site.names) * rank), dtype),
            tuple(jnp.zeros((slots, rank, sizes[name].outputs), dtype) for name in site.names),
        )
        for site in sites(config)
    )


def capacity(adapters: Adapters) -> tuple[int, int]:
    """The number of slots, and the largest rank of an adapter in them."""
    slots, rank, _ = adapters[0].b[0].shape
    return slots, rank


def install(adapters: Adapters, slot: jax.Array, adapter: Mapping[str, Factors], config: Config) -> Adapters:
    """The stacked adapters with the factors of one slot replaced.

    Args:
        adapters: those of all slots.
        slot: int32 `[]`.
        adapter: the new one, every target with its factors; see `lora_files`.
        config: the model's configuration.
    """
    layers_of = {name: target.layers for name, target in targets(config).items()}

    def put(site: Site, stacked: StackedFactors) -> StackedFactors:
        places = [(adapter[name], layers_of[name].index(site.layer)) for name in site.names]
        a = jnp.concatenate([factors.a[place] for factors, place in places], axis=-1)
        return StackedFactors(
            stacked.a.at[slot].set(a.astype(stacked.a.dtype)),
            tuple(
                b.at[slot].set(factors.b[place].astype(b.dtype))
                for b, (factors, place) in zip(stacked.b, places, strict=True)
            ),
        )

    return tuple(map(put, sites(config), adapters))


class RowUpdate(NamedTuple):
    """The update of the linear layers of a site in each row of a pass; see `layers.LowRankUpdate`."""

    factors: StackedFactors
    adapter: jax.Array  # int32 [rows], 0 for none; adapter i is in slot i − 1

    def added(self, outputs: tuple[jax.Array, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        """The outputs `[rows, n, outputs]` of x `[rows, n, inputs]` under each row's adapter."""
        update = one_by_one if default_device().platform == "cpu" else gathered
        return update(self.factors, self.adapter, outputs, x)


def gathered(
    factors: StackedFactors, adapter: jax.Array, outputs: tuple[jax.Array, ...], x: jax.Array
) -> tuple[jax.Array, ...]:
    """Outputs of the layers of a site under each row's adapter, by the factors of every row.

    Args:
        factors: the factors of all adapters.
        adapter: the adapter of each row, int32 `[rows]`, 0 for none.
        outputs: the outputs of each layer, `[rows, n, outputs]`.
        x: the inputs, `[rows, n, inputs]`.
    """
    slot, has = jnp.maximum(adapter - 1, 0), (adapter > 0)[:, None, None]
    parts = jnp.split(jnp.matmul(x, factors.a[slot]), len(outputs), -1)
    return tuple(
        jnp.where(has, y + jnp.matmul(part, b[slot]), y)
        for y, part, b in zip(outputs, parts, factors.b, strict=True)
    )


def one_by_one(
    factors: StackedFactors, adapter: jax.Array, outputs: tuple[jax.Array, ...], x: jax.Array
) -> tuple[jax.Array, ...]:
    """Outputs of the layers of a site, by the update of each adapter that some row has, one after another.

    Args:
        factors: the factors of all adapters.
        adapter: the adapter of each row, int32 `[rows]`, 0 for none.
        outputs: the outputs of each layer, `[rows, n, outputs]`.
        x: the inputs, `[rows, n, inputs]`.
    """
    none = jnp.iinfo(adapter.dtype).max

    def next_after(number: jax.Array) -> jax.Array:
        return jnp.min(jnp.where(adapter > number, adapter, none))

    def update(carry: tuple[jax.Array, tuple[jax.Array, ...]]) -> Any:
        number, outputs = carry
        of_slot = lambda stacked: jax.lax.dynamic_index_in_dim(stacked, number - 1, 0, keepdims=False)
        has = (adapter == number)[:, None, None]
        parts = jnp.split(skinny_matmul(x, of_slot(factors.a))[0], len(outputs), -1)
        updated = tuple(
            jnp.where(has, y + skinny_matmul(part, of_slot(b))[0], y)
            for y, part, b in zip(outputs, parts, factors.b, strict=True)
        )
        return next_after(number), updated

    first = next_after(jnp.zeros((), adapter.dtype))
    return jax.lax.while_loop(lambda carry: carry[0] < none, update, (first, outputs))[1]


@dataclasses.dataclass(frozen=True)
class LoraDecoder:
    """The functions of a model whose rows may each have an adapter: static and hashable, as `Decoder`."""

    decoder: Decoder

    def __post_init__(self) -> None:
        if self.decoder.stacked:
            raise ModelError("model must be loaded without `stacked` to have adapters")

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.decoder.shape

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See `Decoder`."""
        return self.decoder.windows

    @property
    def mesh(self) -> Mesh | None:
        """None: adapters are not divided over devices."""
        return None

    def context_key(self, length: int) -> tuple[int, ...]:
        """See `Decoder`."""
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
            for site, factors in zip(sites(self.decoder.config), params.adapters, strict=True):
                linear = getattr(getattr(module.layers[site.layer], site.block), site.names[0])
                linear.low_rank = RowUpdate(factors, adapter)
        return module(tokens, positions, layers, attend, lengths)

    def logits(self, params: LoraParams, hidden: jax.Array) -> jax.Array:
        """Logits, float32 `[..., vocabulary]`, of hidden states `[..., hidden]`."""
        return self.decoder.logits(params.model, hidden)


def without_adapters(decoder: Any, params: Any) -> tuple[Any, Any]:
    """The functions and parameters of a model without its adapters, if it has any."""
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
