"""Drafts of a fixed length: the controls of the draft-length law."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from entropic_jax.parameter_tables.speculation_names import AUTO
from entropic_jax.speculation import (
    Cascade,
    Draft,
    DraftLength,
    HeadDrafter,
    PassCosts,
    PrunedDrafter,
    Speculator,
    make_speculator,
)
from entropic_jax.speculation.autoregressive import Stopping
from entropic_jax.speculation.registry import pass_widths
from entropic_jax.state.pytree import pytree

from ..workload import WIDTHS

MOST_TOKENS = max(WIDTHS) - 1


@pytree
class FixedLength(DraftLength):
    """Verifies every token that is drafted, in the smallest pass that holds them."""

    def choose(
        self, draft: Draft, active: jax.Array, shift: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `DraftLength`; for a batch whose drafts all fit into its largest pass."""
        number = jnp.where(active, draft.num_tokens, 0).astype(jnp.int32)
        sizes = draft.tokens.shape[0] * jnp.asarray(self.widths)
        return number, jnp.argmax(sizes >= active.sum() + number.sum()).astype(jnp.int32)


@pytree
class EndlessPruned(PrunedDrafter):
    """A pruned drafter that drafts as many tokens as it may."""

    def stopping(self, going: jax.Array, length: jax.Array, shift: jax.Array) -> Stopping:
        """See `AutoregressiveDrafter`."""
        return _never(self.most_tokens)


@pytree
class EndlessHead(HeadDrafter):
    """A draft head that drafts as many tokens as it may."""

    def stopping(self, going: jax.Array, length: jax.Array, shift: jax.Array) -> Stopping:
        """See `AutoregressiveDrafter`."""
        return _never(self.most_tokens)


def _never(most_tokens: int) -> Stopping:
    nothing = jnp.zeros(())
    return Stopping(nothing, nothing, jnp.zeros(most_tokens))


def endless(drafter: Any) -> Any:
    """The drafter, or the cascade, without a stopping rule; a cascade chooses its drafter as before."""
    if isinstance(drafter, Cascade):
        return dataclasses.replace(drafter, drafters=tuple(map(endless, drafter.drafters)))
    for cls, without in ((PrunedDrafter, EndlessPruned), (HeadDrafter, EndlessHead)):
        if isinstance(drafter, cls):
            return without(**_fields(drafter))
    return drafter


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def fixed(name: str, length: int, costs: PassCosts, headed: bool) -> Speculator:
    """A speculator of one row that drafts `length` tokens, where there are as many, and verifies all of them.

    Its passes have the sizes that the engine compiles if no more than `length` tokens are drafted, so that
    one of them holds the draft exactly.

    Args:
        name: the name of the drafter.
        length: the number of tokens.
        costs: the costs of a pass, by which a cascade chooses among its drafters.
        headed: whether the model has a draft head.
    """
    adaptive = make_speculator(name, 1, length, costs, headed)
    assert adaptive is not None and adaptive.law.widths == pass_widths(1, length)
    return Speculator(endless(adaptive.drafter), FixedLength(**_fields(adaptive.law)))


def arms(name: str, lengths: list[int], costs: PassCosts, headed: bool) -> dict[str, Speculator | None]:
    """The arms of a drafter: plain decoding, the law as it ships, and fixed lengths.

    Args:
        name: the name of the drafter.
        lengths: fixed numbers of tokens.
        costs: the costs of a pass.
        headed: whether the model has a draft head, which the name `AUTO` then includes.
    """
    law = make_speculator(name, 1, MOST_TOKENS, costs, headed and name == AUTO)
    return {"off": None, "law": law} | {
        str(n): fixed(name, n, costs, headed and name == AUTO) for n in lengths
    }
