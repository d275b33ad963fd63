"""A second model that drafts: the tokens are those of plain decoding, whatever it says."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, models, parameters, start
from entropic_jax.attention.window_pages import WindowPages
from entropic_jax.speculation import (
    Cascade,
    DraftingDecoder,
    DraftingParams,
    ModelDrafter,
    Speculator,
    SuffixDrafter,
    model_drafter,
    speculator,
)
from entropic_jax.speculation.draft_length import DraftLength
from entropic_jax.speculation.pass_timing import measure_pass_costs
from entropic_jax.speculation.stored_costs import roofline_pass_costs
from entropic_jax.state import Hardware
from tests.marks import exhaustive
from tests.speculation.test_lossless import CONTEXT, PAGE, ROWS, SAMPLING
from tests.speculation.test_lossless import run as run_alone
from tests.tiny import model, prompts

# Another shape in everything, and a vocabulary with less or more padding.
SMALL: dict[str, Any] = dict(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)


def pair(draft: models.Model, context: int | None = None) -> tuple[DraftingDecoder, DraftingParams]:
    target = model()
    decoder = DraftingDecoder(target.decoder, draft.decoder, context)
    return decoder, DraftingParams(target.params, draft.params)


def drafting(most_tokens: int = 2, cascaded: bool = False) -> Speculator:
    drafter: Any = ModelDrafter(
        jnp.array([0.9]), jnp.zeros(0), stop_below=jnp.float32(0), most_tokens=most_tokens
    )
    if cascaded:
        drafter = Cascade((SuffixDrafter(speculator(ROWS).drafter.acceptance, most_tokens), drafter))
    widths = (1, most_tokens + 1)
    return Speculator(drafter, DraftLength(jnp.ones(2, jnp.float32), widths=widths))


def run(
    draft: models.Model, drafts: Speculator, context: int | None = None
) -> tuple[list[list[int]], Any, Any]:
    """The tokens of every row, the last state and the trace, as in `test_lossless`."""
    return run_pair(*pair(draft, context), drafts)


def run_pair(
    decoder: DraftingDecoder, params: DraftingParams, drafts: Speculator
) -> tuple[list[list[int]], Any, Any]:
    """`run` of a model and the model that drafts for it."""
    pool = allocate(decoder.shape, ROWS, CONTEXT, page_size=PAGE)
    state = start(
        decoder,
        params,
        chain(),
        pool,
        prompts(9, 16, 5, 17),
        key=jax.random.key(7),
        sample=parameters(ROWS, **SAMPLING),
        max_tokens=30,
        speculator=drafts,
    )
    state, trace = generate(decoder, params, chain(), state, 60, capacity=60, speculator=drafts)
    trace = jax.device_get(trace)
    return [trace.token[trace.emitted[:, row], row].tolist() for row in range(ROWS)], state, trace


@pytest.fixture(scope="module")
def plain():
    return run_alone(None)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [90, *exhaustive(128)])
def test_a_model_that_drafts_nonsense_changes_nothing(plain, vocabulary):
    tokens, state, trace = run(model(seed=5, vocab_size=vocabulary, **SMALL), drafting())
    assert tokens == plain[0]
    chex.assert_trees_all_equal(state.length, plain[1].length)
    chex.assert_trees_all_equal(state.history, plain[1].history)
    assert trace.num_drafted.sum() > 0.5 * trace.emitted.sum()
    assert (state.ledger.flops > plain[1].ledger.flops).all()  # drafts are charged


@pytest.mark.slow
@pytest.mark.parametrize("cascaded", [True, *exhaustive(False)])
def test_every_draft_of_the_target_itself_is_accepted(plain, cascaded):
    """So no position lacks its keys and values, whoever has drafted, and the noise is the same."""
    tokens, _, trace = run(model(), drafting(cascaded=cascaded))
    assert tokens == plain[0]
    refused = trace.num_drafted.sum() - (trace.emitted & trace.from_draft).sum()
    if cascaded:
        assert trace.from_draft.sum() > 0.3 * trace.emitted.sum()
    else:
        assert trace.from_draft.sum() > 0.6 * trace.emitted.sum()
        assert refused == 0


@pytest.mark.slow
def test_nothing_is_drafted_past_the_context_of_the_draft_model(plain):
    tokens, _, trace = run(model(), drafting(), context=20)
    assert tokens == plain[0]
    position = np.array([9, 16, 5, 17]) + np.cumsum(trace.emitted, 0) - 1
    assert trace.from_draft[position < 20].any()
    assert not trace.from_draft[position > 21].any()


@pytest.mark.slow
def test_keys_and_values_of_both_models_share_the_pages():
    decoder, params = pair(model(seed=5, **SMALL))
    pool = allocate(decoder.shape, 1, 16, page_size=PAGE)
    assert [layer.keys.shape for layer in pool.layers] == [(3, 2, PAGE, 8)] * 2 + [(3, 1, PAGE, 8)]
    state = start(decoder, params, chain(), pool, prompts(9), key=jax.random.key(7), max_tokens=5)
    state, _ = generate(decoder, params, chain(), state, 5)
    written = np.abs(np.asarray(state.cache.layers[2].keys)).sum((1, 3))
    table = np.asarray(state.cache.table)[0]
    assert (written[table].reshape(-1)[: int(state.length[0])] > 0).all()  # plain steps write both, too


def test_a_roofline_knows_what_a_draft_step_costs():
    decoder, _ = pair(model(seed=5, **SMALL))
    machine = dict(bytes_per_weight=4, bytes_per_cache=4, kept=0.1)
    both, alone, draft = (
        roofline_pass_costs(shape, Hardware(1e15, 1e9), **machine)
        for shape in (decoder.shape, decoder.target.shape, decoder.draft.shape)
    )
    # A step of the draft model reads all of its keys and values; a pass reads the weights of both.
    assert both.draft_step == pytest.approx((draft.seconds[0], draft.seconds_per_position[0]))
    assert both.seconds[0] == pytest.approx(alone.seconds[0] + draft.seconds[0])
    assert both.shortest_context == 0


@pytest.mark.exhaustive  # as those of a head, in test_head.py
def test_steps_of_the_draft_model_are_timed():
    decoder, params = pair(model(seed=5, vocab_size=90, **SMALL))
    costs = measure_pass_costs(
        decoder, params, most_tokens=2, context=512, page_size=PAGE, repeat=1, pages=WindowPages()
    )
    # Without context a step may seem to take no time, as one of a head may.
    assert costs.draft_step is not None and min(costs.draft_step) >= 0 and 0 < sum(costs.draft_step) < 1


def test_a_decoder_without_a_draft_model_is_refused():
    drafts = Speculator(model_drafter(2), DraftLength(jnp.ones(2, jnp.float32), widths=(1, 3)))
    with pytest.raises(ValueError, match="decoder must be a DraftingDecoder for a model to draft"):
        run_alone(drafts)
