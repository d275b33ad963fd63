"""Lossless speculative decoding: cheap drafts, one dense pass that verifies them, a law for their number.

Randomness is a function of (key, seed, position), so the same logits draw the same token at a position. A
drafted token is accepted if and only if it is the token that the verified logits draw there: the text is that
of plain decoding, whatever the drafter says. There is no ratio test and no residual distribution.

The life of a pass: drafters continue each row's text (`suffix`, then `pruned`, a draft head or a second
model, in a `cascade`), the draft-length law decides how many of the drafted tokens to verify
(`draft_length`), one forward pass runs over all of them, and emission is repeated position by position, up to
the first token that differs (`verification`).
"""

from ..phases.drafting_decoder import DraftingDecoder, DraftingParams
from ..phases.headed_decoder import DraftHead, HeadedDecoder
from .cascade import Cascade
from .draft_length import DraftLength
from .drafter import ControlledModel, Draft, Drafter
from .head import HeadDrafter, head_drafter
from .model_drafter import ModelDrafter, model_drafter
from .pass_costs import PassCosts
from .pass_timing import measure_pass_costs
from .pruned import PrunedDrafter, pruned_drafter
from .registry import drafts_tokens, make_speculator
from .speculator import (
    Speculator,
    check_speculation,
    draft,
    num_resting,
    rested,
    speculator,
    verify_and_emit,
)
from .suffix import SuffixDrafter, suffix_drafter
from .verification import PassPlan

__all__ = [
    "Cascade",
    "ControlledModel",
    "Draft",
    "DraftHead",
    "DraftLength",
    "Drafter",
    "DraftingDecoder",
    "DraftingParams",
    "HeadDrafter",
    "HeadedDecoder",
    "ModelDrafter",
    "PassCosts",
    "PassPlan",
    "PrunedDrafter",
    "Speculator",
    "SuffixDrafter",
    "check_speculation",
    "draft",
    "drafts_tokens",
    "head_drafter",
    "make_speculator",
    "measure_pass_costs",
    "model_drafter",
    "num_resting",
    "pruned_drafter",
    "rested",
    "speculator",
    "suffix_drafter",
    "verify_and_emit",
]
