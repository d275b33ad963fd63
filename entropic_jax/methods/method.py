"""`Method`: a combination of sparse prefill, KV-cache compression and page selection in decode steps.

A `Method` is a page policy (`attention.page_selection.PagePolicy`). It has up to three parts: a
`PrefillPolicy` selects the pages that each segment of a prompt reads, a `CompressionPolicy` selects the
entries that stay in the KV cache afterwards, and a page policy for decoding selects the pages that a step
reads.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..attention.page_selection import Information, PagePolicy
from ..state.cache import Cache, ModelShape
from .policies import CompressionPolicy, MethodState, ModelWidePolicy, PrefillCost, PrefillPolicy
from .readers import DecodeReader, PrefillReader

SEGMENT = 512  # prompt tokens read at once where no prefill policy says otherwise


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Method:
    """A published method, or a combination. Static: another method compiles another program.

    Args:
        prefill: selects the pages that a prompt's segments read; None reads all.
        compression: selects the entries kept after prefill; None keeps all.
        decode_policy: selects the pages that a decode step reads; None reads all that are held.

    Raises:
        ValueError: for parts that do not work together.
    """

    prefill: PrefillPolicy | None = None
    compression: CompressionPolicy | None = None
    decode_policy: PagePolicy | None = None

    def __post_init__(self) -> None:
        if self.decode_policy is not None and self.ragged:
            raise ValueError(
                f"decode_policy must be None with {self.compression}, whose heads hold different pages; "
                f"got {self.decode_policy} (presets off, micro and macro have none)"
            )
        if self.compression is not None and self.information == "surprisal":
            raise ValueError(
                "decode_policy must weigh pages by value, mass or mahalanobis with a compression, since a "
                "compressed page has no surprisal; got 'surprisal'"
            )

    @property
    def page_size(self) -> int | None:
        """The page size that the decode policy needs, else that of the prefill policy; None for any."""
        size = None if self.decode_policy is None else self.decode_policy.page_size
        return getattr(self.prefill, "page_size", None) if size is None else size

    @property
    def information(self) -> Information:
        """See `PagePolicy`."""
        return "mass" if self.decode_policy is None else self.decode_policy.information

    @property
    def segment(self) -> int:
        """Prompt tokens that are read at once."""
        return SEGMENT if self.prefill is None else self.prefill.segment

    @property
    def ragged(self) -> bool:
        """Whether KV heads may hold different numbers of pages."""
        return self.compression is not None and self.compression.ragged

    def alters(self, positions: int) -> bool:
        """Whether the KV cache of a prompt of `positions` tokens differs from that of a dense prefill."""
        prefill, compression = self.prefill, self.compression
        sparse = prefill is not None and positions > prefill.dense_below
        return sparse or (compression is not None and positions + compression.delay > compression.budget)

    def check_model(self, shape: ModelShape) -> None:
        """Raises ValueError for a model that the prefill policy is not for."""
        if isinstance(self.prefill, ModelWidePolicy):
            self.prefill.check_model(shape)

    def memory(self, shape: ModelShape, cache: Cache) -> MethodState:
        """See `PagePolicy`: the initial state. Raises ValueError as `check_model`."""
        self.check_model(shape)
        rows, pages = cache.table.shape
        layers = range(shape.layers)
        zero = jnp.zeros(rows, jnp.float32)
        prefill, compression, decode_policy = self.prefill, self.compression, self.decode_policy
        all_pages = jnp.full((rows, shape.kv_heads), -1, jnp.int32)
        return MethodState(
            prefill=()
            if prefill is None
            else tuple(prefill.init(rows, shape.kv_heads, pages) for _ in layers),
            observed=() if compression is None else tuple(compression.init(shape, cache) for _ in layers),
            page_lists=() if decode_policy is None else decode_policy.memory(shape, cache),
            held_pages=tuple(jnp.copy(all_pages) for _ in layers) if self.ragged else (),
            kept_pages=jnp.zeros(rows, jnp.int32),
            pending=jnp.full(rows, compression is not None),
            prefill_cost=PrefillCost(zero, jnp.copy(zero)),
        )

    def reader(
        self, cache: Cache, dropped_mass_limit: jax.Array, memory: MethodState, tokens: jax.Array
    ) -> DecodeReader:
        """See `PagePolicy`."""
        return DecodeReader(self.compression, self.decode_policy, cache, dropped_mass_limit, memory, tokens)

    def prompt_reader(self, cache: Cache, memory: MethodState, span: Any, total: jax.Array) -> PrefillReader:
        """See `PagePolicy`."""
        return PrefillReader(self.prefill, self.compression, cache, memory, span, total)
