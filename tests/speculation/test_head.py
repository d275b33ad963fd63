"""A draft head: the tokens are those of plain decoding, and its drafts those that it was trained to make."""

import json
import os
from functools import cache as once
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, models, parameters, start
from entropic_jax.attention.window_pages import WindowPages
from entropic_jax.models import draft_head, draft_head_files
from entropic_jax.models.train import head_forward
from entropic_jax.parameter_tables import speculation_names
from entropic_jax.phases.batch import Batch, gather_active
from entropic_jax.phases.forward import forward
from entropic_jax.speculation import (
    Cascade,
    ControlledModel,
    DraftingParams,
    HeadDrafter,
    HeadedDecoder,
    Speculator,
    SuffixDrafter,
    head_drafter,
    speculator,
)
from entropic_jax.speculation.draft_length import DraftLength
from entropic_jax.speculation.head import draw
from entropic_jax.speculation.pass_timing import measure_pass_costs
from entropic_jax.speculation.stored_costs import TimedModel, known_costs
from tests.marks import exhaustive
from tests.speculation.test_lossless import CONTEXT, PAGE, ROWS, SAMPLING
from tests.speculation.test_lossless import run as run_alone
from tests.tiny import begin, model, prompts

pytestmark = pytest.mark.slow

LENGTHS = 9, 16, 5, 17


@once
def head_of(
    layer: int | None = 1, listed: bool = False, window: int | None = None
) -> tuple[draft_head.DraftHead, models.Params]:
    """A random head of the tiny model, which may draft the odd tokens only."""
    target = model()
    shape = target.decoder.shape
    config = draft_head.HeadConfig(shape.hidden, shape.vocabulary, shape.layers, layer, 48, window)
    head = draft_head.DraftHead(target.decoder, config)
    weights = draft_head.initialise(head, target.params, 3)
    if listed:
        return draft_head.with_list(head, weights, np.arange(1, shape.vocabulary, 2))
    return head, weights


@once
def headed(
    layer: int | None = 1, listed: bool = False, window: int | None = None
) -> tuple[HeadedDecoder, DraftingParams]:
    """The tiny model with the head of `head_of`."""
    target, (head, weights) = model(), head_of(layer, listed, window)
    draft = draft_head.runnable(head, target.params, weights)
    return HeadedDecoder(target.decoder, head), DraftingParams(target.params, draft)


def widened(weights: models.Params) -> models.Params:
    """The parameters of a head that runs, without scales."""
    if not isinstance(weights, dict):
        return weights
    if "scale" in weights:
        return {"kernel": weights["kernel"].astype(jnp.float32) * weights["scale"]}
    return {name: widened(part) for name, part in weights.items()}


def drafted_logits(decoder: HeadedDecoder, params: DraftingParams, features: jax.Array) -> jax.Array:
    """Logits of a head for all tokens, −inf for those that it does not draft."""
    logits = decoder.head.logits(params.target, params.draft, features)
    tokens = decoder.head.drafted_tokens(params.draft)
    everywhere = jnp.full((*logits.shape[:-1], decoder.shape.vocabulary), -jnp.inf)
    return logits if tokens is None else everywhere.at[..., tokens].set(logits)


def drafting(most_tokens: int = 2, cascaded: bool = False) -> Speculator:
    drafter: Any = HeadDrafter(
        jnp.array([0.9]), jnp.zeros(0), stop_below=jnp.float32(0), most_tokens=most_tokens
    )
    if cascaded:
        drafter = Cascade((SuffixDrafter(speculator(ROWS).drafter.acceptance, most_tokens), drafter))
    return Speculator(drafter, DraftLength(jnp.ones(2, jnp.float32), widths=(1, most_tokens + 1)))


def run(
    drafts: Speculator, steps: int = 60, layer: int | None = 1, listed: bool = False, functions: Any = None
) -> tuple[list[list[int]], Any, Any]:
    """The tokens of every row, the last state and the trace, as in `test_lossless`."""
    decoder, params = headed(layer, listed) if functions is None else functions
    pool = allocate(decoder.shape, ROWS, CONTEXT, page_size=PAGE)
    state = start(
        decoder,
        params,
        chain(),
        pool,
        prompts(*LENGTHS),
        key=jax.random.key(7),
        sample=parameters(ROWS, **SAMPLING),
        max_tokens=30,
        speculator=drafts,
    )
    state, trace = generate(decoder, params, chain(), state, steps, capacity=60, speculator=drafts)
    trace = jax.device_get(trace)
    return [trace.token[trace.emitted[:, row], row].tolist() for row in range(ROWS)], state, trace


def hidden_states(text: list[int]) -> np.ndarray:
    """The hidden states of a text, `[tokens, hidden]`, in one pass of the model alone.

    The pass has the same number of tokens for all texts, so that it is compiled once.
    """
    target = model()
    state = start(
        target.decoder,
        target.params,
        chain(),
        allocate(target.decoder.shape, 1, CONTEXT, page_size=PAGE),
        [text[:1]],
        key=jax.random.key(0),
        max_tokens=CONTEXT - 1,
    )
    pages, padded = -(-CONTEXT // PAGE), [*text, *[0] * (CONTEXT - len(text))]
    table = state.cache.table.at[0, :pages].set(jnp.arange(pages))
    state = state._replace(cache=state.cache._replace(table=table))
    tokens, count = jnp.asarray([padded], jnp.int32), jnp.asarray([len(text)], jnp.int32)
    hidden, _ = forward(target.decoder, target.params, state, tokens, count)
    return np.asarray(hidden[0, : len(text)])


@pytest.mark.parametrize(
    ("most_tokens", "cascaded", "layer", "listed"),
    [(3, True, 1, False), *exhaustive((1, False, 1, False), (3, False, None, True))],
)
def test_a_random_head_changes_nothing(most_tokens, cascaded, layer, listed):
    plain = run_alone(None)
    tokens, state, trace = run(drafting(most_tokens, cascaded), layer=layer, listed=listed)
    assert tokens == plain[0]
    assert (state.length == plain[1].length).all()
    assert trace.num_drafted.sum() > 0.5 * trace.emitted.sum()
    assert (state.ledger.flops > plain[1].ledger.flops).all()  # drafts are charged


def test_the_head_reads_the_hidden_state_that_the_last_token_was_drawn_from():
    """After prefill, and after passes of which any number of drafts was accepted."""
    accepted = set()
    for steps in (0, 1, 6):
        tokens, state, trace = run(drafting(3), steps)
        for row, prompt in enumerate(prompts(*LENGTHS)):
            text = [*prompt, *tokens[row]][: int(state.length[row])]
            np.testing.assert_allclose(state.features[row], hidden_states(text)[-1], atol=2e-5, rtol=1e-4)
        accepted |= set((trace.emitted & trace.from_draft).sum(0).tolist())
    assert len(accepted) > 1


def test_plain_decoding_keeps_the_hidden_state_too():
    """An engine may decode without drafts in one launch, and with them in the next."""
    decoder, params = headed()
    pool = allocate(decoder.shape, ROWS, CONTEXT, page_size=PAGE)
    state = start(
        decoder,
        params,
        chain(),
        pool,
        prompts(*LENGTHS),
        key=jax.random.key(7),
        max_tokens=30,
        speculator=drafting(),
    )
    state, trace = generate(decoder, params, chain(), state, 3, capacity=3)
    for row, prompt in enumerate(prompts(*LENGTHS)):
        text = [*prompt, *np.asarray(trace.token)[:, row].tolist()][: int(state.length[row])]
        np.testing.assert_allclose(state.features[row], hidden_states(text)[-1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("layer", "listed"), [(1, False), (None, False), (None, True)])
def test_drafts_are_those_of_training(layer, listed):
    """The first drafts of greedy rows are the likeliest tokens of what training computes there."""
    (decoder, params), drafts = headed(layer, listed), drafting(3)
    pool = allocate(decoder.shape, 1, CONTEXT, page_size=PAGE)
    (prompt,) = prompts(20)
    state = start(
        decoder,
        params,
        chain(),
        pool,
        [prompt],
        key=jax.random.key(7),
        max_tokens=30,
        sample=parameters(1, temperature=0.0),
        speculator=drafts,
    )
    _, _, batch = gather_active(state, None, 3)
    controlled = ControlledModel(decoder, params, chain())
    _, draft = drafts.drafter.draft(controlled, batch, jnp.array([3]))
    target = head_forward.Target(decoder.target, params.target)

    @jax.jit
    def trained(tokens):
        taught = head_forward.teach(target, decoder.head.layer, tokens)
        weights = widened(params.draft.weights)
        features = head_forward.drafted_features(decoder.head, target, weights, tokens, taught, 3)
        return [drafted_logits(decoder, params, part) for part in features]

    text = [*prompt, 0, 0]  # what comes later is not seen, so the length may stay the same
    for number in range(3):
        # Training sees the text with the drafts that went before; the round starts at its last prompt token.
        expected = trained(jnp.asarray([text], jnp.int32))[number]
        likeliest = int(jnp.argmax(expected[0, len(prompt) - 1]))
        assert not listed or likeliest % 2
        assert int(draft.tokens[0, number]) == likeliest
        if number < 2:
            text[len(prompt) + number] = likeliest
    assert int(draft.num_tokens[0]) == 3


@pytest.mark.parametrize("window", [None, PAGE + 3, *exhaustive(1)])
def test_a_window_leaves_earlier_positions_unread(window):
    """Keys and values before the window are NaN: without one, nothing is drafted."""
    (decoder, params), drafts = headed(window=window), drafting(3)
    pool = allocate(decoder.shape, 1, CONTEXT, page_size=PAGE)
    options: Any = dict(key=jax.random.key(7), max_tokens=30, speculator=drafts)
    state = start(decoder, params, chain(), pool, prompts(20), **options)
    seen = int(state.length[0]) - (window or 0)
    pages, slots = np.asarray(state.cache.table)[0, np.arange(seen) // PAGE], np.arange(seen) % PAGE
    layer = state.cache.layers[1]
    poisoned = layer._replace(
        keys=layer.keys.at[pages, :, slots].set(jnp.nan), values=layer.values.at[pages, :, slots].set(jnp.nan)
    )
    layers = (state.cache.layers[0], poisoned)

    @jax.jit
    def draft(state):
        _, _, batch = gather_active(state, None, 3)
        return drafts.drafter.draft(ControlledModel(decoder, params, chain()), batch, jnp.array([3]))[1]

    clean, dirty = draft(state), draft(state._replace(cache=state.cache._replace(layers=layers)))
    assert int(clean.num_tokens[0]) == 3
    if window is None:
        assert int(dirty.num_tokens[0]) == 0
    else:
        assert dirty.tokens.tolist() == clean.tokens.tolist() and int(dirty.num_tokens[0]) == 3


def test_a_head_states_how_often_its_drafts_are_accepted():
    decoder, params = headed()
    drafter = head_drafter(2).calibrated(_controlled(decoder, params))
    edges, table, mean = decoder.head.acceptance
    entropies = jnp.array([0.0, *edges]) + 0.01
    np.testing.assert_allclose(drafter.probability(entropies), table, rtol=1e-6)
    assert float(drafter.mean_acceptance) == pytest.approx(mean)


def test_steps_of_a_head_are_cheaper_than_passes():
    decoder, params = headed()
    costs = known_costs(TimedModel(decoder, params, PAGE, jnp.float32))
    assert costs.head_step is not None and 0 < costs.head_step[0] < costs.seconds[0]
    assert costs.draft_step is not None and costs.draft_step[0] > 0


@pytest.mark.exhaustive
def test_steps_of_a_head_are_timed():
    decoder, params = headed(window=16)
    costs = measure_pass_costs(
        decoder, params, most_tokens=2, context=96, page_size=PAGE, repeat=1, pages=WindowPages()
    )
    # Without context a step may seem to take no time, where a disturbance makes that of a long one short.
    assert costs.draft_step is not None and min(costs.draft_step) >= 0 and 0 < sum(costs.draft_step) < 1
    assert costs.head_step is not None and costs.head_step[1] == 0 < costs.head_step[0] < 1


def test_a_decoder_without_a_head_is_refused():
    drafts = Speculator(head_drafter(2), DraftLength(jnp.ones(2, jnp.float32), widths=(1, 3)))
    with pytest.raises(ValueError, match="decoder must be a HeadedDecoder for a head to draft"):
        run_alone(drafts)


def test_a_list_of_tokens_leaves_their_logits_as_they_are():
    decoder, params = headed(None, True)
    features = jax.random.normal(jax.random.key(0), (2, decoder.shape.hidden))
    logits = drafted_logits(decoder, params, features)
    everywhere = decoder.target.logits(params.target, features)
    # The projection to the list may be of int8.
    np.testing.assert_allclose(logits[:, 1::2], everywhere[:, 1::2], atol=0.01 * jnp.abs(everywhere).max())
    assert (logits[:, ::2] == -jnp.inf).all()
    assert decoder.head.shape.weights < headed(None)[0].head.shape.weights


@pytest.mark.parametrize("key", [jax.random.key(4), jax.random.key(4, impl="rbg")], ids=["threefry", "rbg"])
@pytest.mark.parametrize(
    "sampling",
    [
        dict(temperature=[0.0, 0.7, 1.3]),
        dict(temperature=1.0, top_k=5),
        dict(temperature=0.9, top_p=0.8, min_p=0.02),
        dict(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.2),
        dict(temperature=1.0, logit_bias={4: 9.0, 7: 1.0}),
    ],
    ids=["temperature", "top-k", "top-p", "penalties", "bias"],
)
def test_drafts_of_a_list_are_those_of_the_vocabulary_with_the_rest_masked(sampling, key):
    rows, vocabulary = 3, 96
    state = begin(prompts(5, 9, 13))._replace(key=key, sampling=parameters(rows, **sampling))
    temperature = jnp.broadcast_to(jnp.asarray(sampling["temperature"], jnp.float32), rows)
    state = state._replace(action=state.action._replace(temperature=temperature))
    tokens = jnp.arange(3, vocabulary, 2, dtype=jnp.int32)
    logits = 2 * jax.random.normal(jax.random.key(8), (rows, len(tokens)))
    everywhere = jnp.full((rows, vocabulary), -jnp.inf).at[:, tokens].set(logits)
    batch = Batch(state, jnp.array([True, True, False]))
    draw_both = jax.jit(lambda batch: (draw(batch, logits, tokens), draw(batch, everywhere)))
    for position in range(12):
        batch = batch._replace(state=state._replace(length=state.length + position))
        listed, expected = draw_both(batch)
        assert listed.token.tolist() == expected.token.tolist()
        np.testing.assert_allclose(listed.entropy, expected.entropy, rtol=1e-5)
        np.testing.assert_array_equal(listed.state.history.generated, expected.state.history.generated)


@pytest.mark.parametrize(("layer", "listed", "window"), [(1, False, None), (None, True, None), (0, False, 7)])
def test_saved_heads_load(tmp_path, layer, listed, window):
    saved, numbers = head_of(layer, listed, window)
    draft_head_files.save(tmp_path / "head", saved, numbers, jnp.float32)
    head, weights = draft_head_files.load(tmp_path / "head", saved.target)
    assert head == saved
    jax.tree.map(np.testing.assert_array_equal, weights, numbers)


def test_the_command_line_recognises_what_the_model_saves(tmp_path):
    # Options are parsed without JAX, so they test for a head by a function of their own.
    draft_head_files.save(tmp_path, *head_of())
    for directory in (tmp_path, tmp_path.parent):
        assert speculation_names.is_draft_head(str(directory)) == draft_head_files.is_draft_head(directory)
    assert draft_head_files.is_draft_head(tmp_path)
    assert speculation_names.HEAD_TYPE == draft_head_files.MODEL_TYPE
    file = tmp_path / "config.json"
    for damage in (lambda: file.write_text("[" * 10**5), lambda: os.mkfifo(file)):
        file.unlink()
        damage()
        assert not speculation_names.is_draft_head(str(tmp_path))
        assert not draft_head_files.is_draft_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 31}, "hidden_size must be that of the model, 32; got 31"),
        ({"vocab_size": 95}, "vocab_size must be that of the model, 96; got 95"),
        ({"num_hidden_layers": 3}, "num_hidden_layers must be that of the model, 2; got 3"),
        ({"layer": 2}, r"layer must be in \[0, 1\]; got 2"),
        ({"window": 0}, "window must be null or a whole number from 1 on; got 0"),
        ({"window": True}, "window must be null or a whole number from 1 on; got True"),
        ({"drafted_tokens": 0}, "drafted_tokens must be null or at most 96; got 0"),
        ({"drafted_tokens": 97}, "drafted_tokens must be null or at most 96; got 97"),
        ({"drafted_tokens": 9}, r"tokens must have the shape \(9,\); got None"),
        ({"layer": True}, r"layer must be a whole number below 2\*\*20; got True"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1; got 0"),
        ({"intermediate_size": 49}, r"must have the shape \(49, 32\); got \(48, 32\)"),
        ({"acceptance": [0.5]}, "entropy_edges must ascend, with one acceptance more than edges"),
        ({"acceptance": [0.5, 0.5, 0.5, 1.5]}, r"must lie in \(0, 1\); got"),
        ({"entropy_edges": "x"}, "entropy_edges must be a list of numbers; got 'x'"),
        ({"mean_acceptance": None}, r"must lie in \(0, 1\); got"),
        ({"model_type": "llama"}, "holds no draft head"),
    ],
)
def test_damaged_heads_are_refused(tmp_path, change, message):
    draft_head_files.save(tmp_path, *head_of())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(models.ModelError, match=message):
        draft_head_files.load(tmp_path, model().decoder)


def test_a_head_with_another_vocabulary_is_refused(tmp_path):
    head, weights = head_of(None, True)
    damaged = {**weights, "tokens": weights["tokens"].at[0].set(96)}
    draft_head_files.save(tmp_path, head, damaged)
    with pytest.raises(models.ModelError, match="tokens must be tokens of the model, below 96"):
        draft_head_files.load(tmp_path, model().decoder)


def test_a_head_without_tensors_is_refused(tmp_path):
    draft_head_files.save(tmp_path, *head_of())
    (tmp_path / draft_head_files.TENSORS).write_bytes(b"nothing")
    with pytest.raises(models.ModelError, match=r"draft_head\.safetensors cannot be read"):
        draft_head_files.load(tmp_path, model().decoder)


def _controlled(decoder: HeadedDecoder, params: DraftingParams) -> Any:
    return ControlledModel(decoder, params, chain())
