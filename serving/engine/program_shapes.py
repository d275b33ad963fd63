"""Shapes and static arguments that the programs of an engine are compiled for."""

import dataclasses
from typing import NamedTuple

from entropic_jax.attention.page_selection import PagePolicy
from entropic_jax.methods.entropix_branches import SearchPlan
from entropic_jax.methods.method import Method
from entropic_jax.methods.policies import CompressionPolicy
from entropic_jax.parameter_tables.speculation_names import DEFAULT_DRAFTED, OFF
from entropic_jax.speculation import PassCosts, Speculator, drafts_tokens, make_speculator


class DecodeProgram(NamedTuple):
    """Static arguments of a decode program."""

    width: int  # rows that a step computes
    page_policy: PagePolicy | None  # which pages the steps read
    samples: bool  # whether the engine's sampler draws the tokens of some rows
    speculates: bool = False  # whether steps draft tokens and verify several at once


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes and static arguments that programs are compiled for."""

    widths: tuple[int, ...]  # batch buckets: rows of a decode step, ascending
    chunks: tuple[tuple[int, int], ...]  # prefill chunks: (prompts, tokens of each)
    capacity: int  # steps of a launch, at most
    page_policies: tuple[PagePolicy | None, ...]
    samplers: tuple[bool, ...] = (False,)  # whether the engine's sampler draws the tokens of some rows
    method: Method | None = None  # sparse prefill or KV compression
    plan: SearchPlan | None = None  # of the branches that sequences may have
    exact: bool = False  # a step computes the same rows whether any branches or none
    speculate: str = OFF  # name of the drafter
    num_speculative_tokens: int | None = None  # k, tokens drafted for a row in a step, at most

    @property
    def speculates(self) -> bool:
        """Whether there are programs that draft tokens."""
        return bool(self.drafting_widths)

    @property
    def drafting_widths(self) -> tuple[int, ...]:
        """The batch buckets that draft tokens: a larger batch is bound by arithmetic without any."""
        return tuple(rows for rows in self.widths if drafts_tokens(self.speculate, rows, self.drafted))

    @property
    def drafted(self) -> int:
        """k, tokens drafted for a row in a step, at most."""
        return DEFAULT_DRAFTED if self.num_speculative_tokens is None else self.num_speculative_tokens

    def tokens(self, speculates: bool) -> int:
        """Tokens that a row emits in a step, at most."""
        return 1 + self.drafted if speculates else 1

    @property
    def planned_tokens(self) -> int:
        """Tokens that the plan of a sequence with a grammar expects, at most.

        0 where sequences may branch, so that a launch with a sequence that has a grammar has one step.
        """
        return 0 if self.plan is not None else self.tokens(True) - 1

    def speculator(
        self, rows: int, costs: PassCosts | None = None, headed: bool = False
    ) -> Speculator | None:
        """The speculator that drafts the tokens of a batch.

        Args:
            rows: number of rows of the batch.
            costs: the costs of passes on this machine.
            headed: whether the model has a draft head.
        """
        if rows not in self.drafting_widths:
            return None
        return make_speculator(self.speculate, rows, self.drafted, costs, headed)

    @property
    def longest_chunk(self) -> tuple[int, int]:
        """The chunk of the most tokens among those of the fewest prompts."""
        return max(self.chunks, key=lambda chunk: (-chunk[0], chunk[1]))

    @property
    def segment(self) -> int | None:
        """Tokens that every prefill chunk of a prompt but the last must have; None if any number will do."""
        return None if self.method is None or self.method.prefill is None else self.method.segment

    @property
    def branches(self) -> int:
        """Rows of the state that a sequence has."""
        return 1 if self.plan is None else self.plan.branches

    @property
    def compression(self) -> CompressionPolicy | None:
        """How the KV cache of a prompt is compressed."""
        return None if self.method is None else self.method.compression
