"""Norms as flax nnx modules: RMS norm and layer norm, with or without an offset of the weight or a bias."""

import jax
import jax.numpy as jnp
from flax import nnx

from entropic_jax.mesh import first_of_shard, num_shards, sum_over_shards
from entropic_jax.pallas.rms_norm import rms_norm

from .block_spec import NormSpec


class RMSNorm(nnx.Module):
    """x / rms(x) · (offset + weight) over the last axis, the mean square in float32 (arXiv 1910.07467).

    Args:
        size: the size of the last axis.
        spec: epsilon, offset, and whether there is a weight.
    """

    def __init__(self, size: int, spec: NormSpec) -> None:
        self.weight = nnx.Param(jnp.full(size, 1 - spec.offset)) if spec.weight else None
        self.epsilon, self.offset = spec.epsilon, spec.offset

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.weight is None:
            return rms_norm(x, jnp.ones(x.shape[-1], x.dtype), self.epsilon)
        if not self.offset:
            return rms_norm(x, self.weight[...], self.epsilon)
        # A weight of half precision is widened before the offset would round it.
        weight = self.weight[...].astype(jnp.float32) + self.offset
        return rms_norm(x.astype(jnp.float32), weight, self.epsilon).astype(x.dtype)


class WideRMSNorm(RMSNorm):
    """RMS norm of all heads at once, of which each device of a mesh has some.

    Every device has the weight of all heads, and the mean square is taken over all of them.
    """

    def __call__(self, x: jax.Array) -> jax.Array:
        if num_shards() == 1:
            return super().__call__(x)
        assert self.weight is not None, "norms without a weight are of single heads"
        size, wide = x.shape[-1], x.astype(jnp.float32)
        weight = jax.lax.dynamic_slice_in_dim(self.weight[...], first_of_shard(size), size)
        squares = sum_over_shards(jnp.square(wide).sum(-1, keepdims=True)) / (size * num_shards())
        out = wide * jax.lax.rsqrt(squares + self.epsilon) * (weight.astype(jnp.float32) + self.offset)
        return out.astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x − mean) / std · (offset + weight) + bias over the last axis, in float32 (arXiv 1607.06450).

    Args:
        shape: the shape of the weight: the last axis, or heads and the last axis.
        spec: epsilon, offset, and whether there are a weight and a bias.
    """

    def __init__(self, shape: int | tuple[int, ...], spec: NormSpec) -> None:
        self.weight = nnx.Param(jnp.full(shape, 1 - spec.offset)) if spec.weight else None
        self.bias = nnx.Param(jnp.zeros(shape)) if spec.bias else None
        self.epsilon, self.offset = spec.epsilon, spec.offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        out = centred * jax.lax.rsqrt(variance + self.epsilon)
        if self.weight is not None:
            out = out * (self.weight[...].astype(jnp.float32) + self.offset)
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out.astype(x.dtype)


def norm(size: int, spec: NormSpec) -> RMSNorm | LayerNorm:
    """The norm of a specification over a last axis of this size."""
    return RMSNorm(size, spec) if spec.kind == "rms" else LayerNorm(size, spec)
