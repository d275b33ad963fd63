"""Multi-head latent attention (MLA): all heads attend to one latent vector per token.

What is cached is one head of width `latent + rope.dim`: the vector from which keys and values of all heads
are made, and the rotated part of the key that all heads share. The up-projection of the keys is applied to
the queries instead, and that of the values to the output of attention, so that the cache is never expanded.

Source: DeepSeek-V2 (2024; arXiv 2405.04434), section 2.1. Differs from the paper: the latent vector is stored
twice, as key and as value, because a cache layer has two arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .block_spec import LatentAttentionSpec
from .layers import Attend, Linear, TokenContext, fused_linear
from .norms import RMSNorm
from .rope import apply_rope


class LatentAttention(nnx.Module):
    """Queries, latent keys and values, and rotary embedding around an `Attend`.

    Args:
        hidden: width of input and output.
        spec: sizes and switches.
    """

    def __init__(self, hidden: int, spec: LatentAttentionSpec) -> None:
        self.spec = spec
        queries = spec.heads * (spec.key_dim + spec.rope.dim)
        if spec.query_latent is None:
            self.q_proj = Linear(hidden, queries)
        else:
            self.q_a_proj = Linear(hidden, spec.query_latent, spec.bias)
            self.q_a_layernorm = RMSNorm(spec.query_latent, spec.norm)
            self.q_b_proj = Linear(spec.query_latent, queries)
        self.kv_a_proj_with_mqa = Linear(hidden, spec.latent + spec.rope.dim, spec.bias)
        self.kv_a_layernorm = RMSNorm(spec.latent, spec.norm)
        self.kv_b_proj = Linear(spec.latent, spec.heads * (spec.key_dim + spec.value_dim))
        self.o_proj = Linear(spec.heads * spec.value_dim, hidden, spec.bias)

    def __call__(
        self, x: jax.Array, context: TokenContext, cache: Any, attend: Attend
    ) -> tuple[jax.Array, Any]:
        spec, (rows, length, _) = self.spec, x.shape
        if spec.query_latent is None:
            query, latent = fused_linear(x, self.q_proj, self.kv_a_proj_with_mqa)
        else:
            low, latent = fused_linear(x, self.q_a_proj, self.kv_a_proj_with_mqa)
            query = self.q_b_proj(self.q_a_layernorm(low))
        query = query.reshape(rows, length, spec.heads, -1)
        rotation = context.rotations[spec.rope]
        rotate = lambda y: apply_rope(y, rotation, spec.rope.interleaved)
        shared = rotate(latent[:, :, None, spec.latent :])
        key = jnp.concatenate((self.kv_a_layernorm(latent[:, :, None, : spec.latent]), shared), axis=-1)
        up = self.kv_b_proj.kernel[...].astype(x.dtype).reshape(spec.latent, spec.heads, -1)
        absorbed = jnp.einsum("rnhd,lhd->rnhl", query[..., : spec.key_dim], up[..., : spec.key_dim])
        query = jnp.concatenate((absorbed, rotate(query[..., spec.key_dim :])), axis=-1)
        query = (query.astype(jnp.float32) * (spec.scale * spec.cache_dim**0.5)).astype(x.dtype)
        out, cache = attend(query, key, key, cache, window=spec.window)
        out = jnp.einsum("rnhl,lhd->rnhd", out[..., : spec.latent], up[..., spec.key_dim :])
        return self.o_proj(out.reshape(rows, length, -1)), cache
