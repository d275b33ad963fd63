"""Drafters over stacked layers: a head that reads one of them, and a model whose layers follow them."""

import dataclasses

import jax
import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import draft_head
from entropic_jax.models.layer_stack import stack_layers
from entropic_jax.speculation import DraftingDecoder, DraftingParams, HeadedDecoder
from tests.speculation import test_head, test_model_drafter
from tests.tiny import model


@pytest.mark.exhaustive
def test_a_head_reads_a_layer_of_a_stack():
    """Tokens, drafts and acceptance are those over separate layers."""
    decoder, params = test_head.headed()
    stacked = stack_layers(dataclasses.replace(model(), params=jax.tree.map(lambda x: x, model().params)))
    head = dataclasses.replace(decoder.head, target=stacked.decoder)
    ours = HeadedDecoder(stacked.decoder, head), params._replace(target=stacked.params)
    (expected, _, plain), (tokens, state, trace) = (
        test_head.run(test_head.drafting(), functions=functions) for functions in ((decoder, params), ours)
    )
    assert tokens == expected and len(state.cache.layers.pools) == 1
    np.testing.assert_array_equal(trace.from_draft, plain.from_draft)
    np.testing.assert_array_equal(trace.num_drafted, plain.num_drafted)
    with pytest.raises(models.ModelError, match="model must be loaded without `stacked` to train"):
        draft_head.initialise(head, stacked.params, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_itself", [True, False])
def test_stacked_models_draft_the_tokens_of_separate_layers(is_itself):
    """A model drafts for itself, so that all drafts are accepted; or one of a layer does, without a stack."""
    draft = model() if is_itself else model(seed=5, **{**test_model_drafter.SMALL, "num_hidden_layers": 1})
    runs = []
    for lay_out in (lambda x: x, stack_layers):
        target, drafting = (
            lay_out(dataclasses.replace(m, params=jax.tree.map(lambda x: x, m.params)))
            for m in (model(), draft)
        )
        decoder = DraftingDecoder(target.decoder, drafting.decoder)
        params = DraftingParams(target.params, drafting.params)
        runs.append(test_model_drafter.run_pair(decoder, params, test_model_drafter.drafting()))
    (expected, _, plain), (tokens, state, trace) = runs
    assert tokens == expected and trace.num_drafted.sum() > 0.5 * trace.emitted.sum()
    np.testing.assert_array_equal(trace.from_draft, plain.from_draft)
    np.testing.assert_array_equal(trace.num_drafted, plain.num_drafted)
    refused = trace.num_drafted.sum() - (trace.emitted & trace.from_draft).sum()
    assert refused == 0 or not is_itself
    assert len(state.cache.layers.pools) == 2 and len(state.cache.layers) == 2 + (2 if is_itself else 1)
