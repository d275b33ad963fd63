"""Speculators by the name of their drafter, with passes of a few compiled sizes."""

from typing import Any

import jax

from ..pallas.skinny_matmul import SKINNY_ROWS, multiplies
from ..parameter_tables.speculation_names import (
    AUTO,
    DEFAULT_DRAFTED,
    DRAFTS_FROM_PAGES,
    OFF,
    check_drafter,
    is_draft_head,
    is_draft_model,
)
from .cascade import Cascade
from .draft_length import DraftLength, draft_length
from .head import head_drafter
from .model_drafter import model_drafter
from .pass_costs import PassCosts
from .pruned import pruned_drafter
from .speculator import Speculator, speculator
from .suffix import suffix_drafter

UNMEASURED_STEP = 0.6, 0.0  # what a step of the pruned drafter is taken to cost, in passes of one token
UNMEASURED_MODEL_STEP = 0.25, 0.0  # the same of a step of a draft model or head
UNMEASURED_CONTEXT = 4096  # positions; nothing is drafted from few pages in shorter texts
ACCELERATOR_PASS = 512  # tokens of all rows, beyond which a batch is bound by arithmetic
CPU_PASS = 128  # the same on a CPU


def make_speculator(
    name: str,
    rows: int,
    num_tokens: int | None = None,
    costs: PassCosts | None = None,
    headed: bool = False,
) -> Speculator | None:
    """The speculator of a batch; None for the name "off".

    Args:
        name: the name of the drafter, one of `speculation_names.DRAFTERS`, or the directory of a draft model,
            or of a draft head. The passes must then be those of a `DraftingDecoder` or `HeadedDecoder`.
        rows: number of rows of the batch.
        num_tokens: k, the tokens drafted for a row at most; None for the default.
        costs: the costs of a pass, as measured; None for those of `draft_length`.
        headed: whether the model is a `HeadedDecoder`, whose head the name "auto" then includes.

    Raises:
        ParameterError: for another name or number.
    """
    check_drafter(name, num_tokens)
    if name == OFF:
        return None
    k = DEFAULT_DRAFTED if num_tokens is None else num_tokens
    widths = pass_widths(rows, k)
    law = draft_length(rows, widths=widths) if costs is None else costs.law(rows, widths)
    return speculator(rows, _drafter(name, rows, k, law, costs, headed), law)


def drafts_tokens(name: str, rows: int, num_tokens: int) -> bool:
    """Whether a batch drafts tokens: there is a drafter, and room for drafts in a pass.

    Args:
        name: the name of the drafter, or "off".
        rows: number of rows of the batch.
        num_tokens: k, the tokens drafted for a row at most.
    """
    return name != OFF and len(pass_widths(rows, num_tokens)) > 1


def _drafter(name: str, rows: int, k: int, law: DraftLength, costs: PassCosts | None, headed: bool) -> Any:
    """The drafter of a name. Measured costs or not, it is a pytree of one structure."""
    suffix, head = suffix_drafter(k), ()
    if is_draft_head(name) or (headed and name == AUTO):
        step = UNMEASURED_MODEL_STEP if costs is None else costs.head_step_costs(rows)
        head = (head_drafter(k, law, step),)
    if is_draft_head(name):
        return Cascade((suffix, *head), law)
    if is_draft_model(name):
        step = UNMEASURED_MODEL_STEP if costs is None else costs.draft_step_costs(rows)
        return Cascade((suffix, model_drafter(k, law, step)), law)
    if name not in DRAFTS_FROM_PAGES:
        return suffix
    step = UNMEASURED_STEP if costs is None else costs.draft_step_costs(rows)
    shortest = UNMEASURED_CONTEXT if costs is None else costs.shortest_context
    pruned = pruned_drafter(k, law=law, step_costs=step, shortest_context=shortest)
    return Cascade((suffix, *head, pruned), law) if name == AUTO else pruned


def largest_pass() -> int:
    """Tokens of all rows that a pass with drafts has at most.

    On a CPU, a larger one is bound by arithmetic however long the rows' contexts are. A machine on which XLA
    multiplies more than `SKINNY_ROWS` rows has no larger ones, which would have other bits than decoding.
    """
    if jax.default_backend() != "cpu":
        return ACCELERATOR_PASS
    return CPU_PASS if multiplies(CPU_PASS) else SKINNY_ROWS


def pass_widths(rows: int, num_tokens: int, largest: int | None = None) -> tuple[int, ...]:
    """Compiled sizes of a pass, in tokens a row on average, ascending; with one alone nothing is drafted.

    Args:
        rows: number of rows of the batch.
        num_tokens: k, the tokens drafted for a row at most.
        largest: tokens of a pass, at most; None for `largest_pass()`.

    >>> pass_widths(4, 15, 256), pass_widths(32, 15, 64), pass_widths(48, 15, 64), pass_widths(1, 4, 64)
    ((1, 2, 4, 8, 16), (1, 2), (1,), (1, 2, 4, 5))
    """
    widest = num_tokens + 1
    powers = [1 << n for n in range(widest.bit_length()) if 1 << n < widest]
    room = (largest_pass() if largest is None else largest) // rows
    return tuple(width for width in (*powers, widest) if width <= max(1, room))
