"""Model drafter: a second, smaller model with the same tokens, which shares the pages of the KV cache."""

import jax
import jax.numpy as jnp

from ..phases.batch import Batch
from ..phases.drafting_decoder import DraftingDecoder
from ..state.pytree import pytree
from .autoregressive import AutoregressiveDrafter
from .draft_length import DraftLength
from .drafter import ControlledModel, Draft

# P(accepted) by the draft's entropy, nats, and its mean: a guess, since every pair of models has its own.
# Each row corrects them by its own record.
ENTROPY_EDGES, ACCEPTANCE, MEAN_ACCEPTANCE = (0.3, 1.5, 2.7), (0.95, 0.8, 0.65, 0.5), 0.75


@pytree
class ModelDrafter(AutoregressiveDrafter):
    """Drafts with the smaller model of a `DraftingDecoder`; costs a step of that model per token."""

    mean_acceptance: jax.Array | float = MEAN_ACCEPTANCE  # P: of a token before it is drafted

    def draft(self, model: ControlledModel, batch: Batch, max_drafts: jax.Array) -> tuple[Batch, Draft]:
        """See `Drafter`. Nothing is drafted past the positions that the draft model is made for."""
        context = _both(model).draft_context
        if context is not None:
            max_drafts = jnp.minimum(
                max_drafts, jnp.maximum(context - batch.state.length - batch.state.evicted, 0)
            )
        return super().draft(model, batch, max_drafts)

    def drafting(self, model: ControlledModel) -> tuple[ControlledModel, slice]:
        """See `AutoregressiveDrafter`."""
        both = _both(model)
        drafting = ControlledModel(both.draft_model, model.params.draft, model.controller)
        return drafting, slice(both.target_layers, None)


def model_drafter(
    most_tokens: int = 7, law: DraftLength | None = None, step_costs: tuple[float, float] = (0.25, 0.0)
) -> ModelDrafter:
    """A model drafter with the default table of acceptance.

    Args:
        most_tokens: k, the tokens drafted at most.
        law: what passes cost; None drafts as if they cost nothing.
        step_costs: the costs of a draft step of the batch, in the law's unit of time: without context, and
            what each cached position of a row adds.
    """
    tables = jnp.asarray(ACCEPTANCE, jnp.float32), jnp.asarray(ENTROPY_EDGES, jnp.float32)
    costs = jnp.asarray(step_costs, jnp.float32)
    return ModelDrafter(*tables, law=law, step_costs=costs, most_tokens=most_tokens)


def _both(model: ControlledModel) -> DraftingDecoder:
    if not isinstance(model.decoder, DraftingDecoder):
        raise ValueError(
            "decoder must be a DraftingDecoder for a model to draft, which writes the keys and values of "
            f"both; got {model.decoder}"
        )
    return model.decoder
