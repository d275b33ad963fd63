"""Speculative decoding emits the tokens of plain decoding, whatever a drafter proposes."""

import re
from typing import Annotated, Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from entropic_jax import allocate, chain, generate, parameters, start
from entropic_jax.attention.window_pages import WindowPages
from entropic_jax.methods import presets
from entropic_jax.speculation import Cascade, Draft, PrunedDrafter, Speculator, SuffixDrafter, speculator
from entropic_jax.speculation.draft_length import DraftLength
from entropic_jax.state import FULL, RUNNING, STOPPED
from entropic_jax.state.pytree import STATIC, pytree
from tests.marks import exhaustive
from tests.tiny import model, prompts

ROWS, CONTEXT, PAGE = 4, 64, 8
# Rows that differ in everything that sampling can depend on.
SAMPLING: dict[str, Any] = dict(
    temperature=[0.0, 0.7, 1.0, 1.3],
    top_p=[1.0, 1.0, 0.9, 1.0],
    min_p=[0.0, 0.0, 0.0, 0.05],
    repetition_penalty=[1.0, 1.2, 1.0, 1.0],
    presence_penalty=[0.0, 0.0, 0.4, 0.0],
    frequency_penalty=[0.0, 0.0, 0.0, 0.3],
    dry_multiplier=[0.0, 0.0, 0.0, 0.8],
    dry_allowed_length=[2, 2, 2, 1],
    logit_bias=[{}, {5: 2.0}, {}, {7: -4.0}],
)


@pytree
class Script:
    """Proposes what is written for each position of a row, which it knows by its seed."""

    tokens: jax.Array  # int32 [seeds, positions]
    acceptance: jax.Array  # float32 [], what it claims
    most_tokens: Annotated[int, STATIC] = 5

    def draft(self, model: Any, batch: Any, most: jax.Array) -> tuple[Any, Draft]:
        state = batch.state
        place = (state.length + state.evicted + 1)[:, None] + jnp.arange(self.most_tokens)
        tokens = self.tokens[state.seed[:, None], jnp.minimum(place, self.tokens.shape[1] - 1)]
        claimed = jnp.broadcast_to(self.acceptance, tokens.shape)
        return batch, Draft(tokens, jnp.where(batch.active, self.most_tokens, 0), claimed)


@pytree
class EmittingPasses:
    """Counts the passes in which each row emits."""

    def init(self, action: Any) -> jax.Array:
        return jnp.zeros_like(action.quota)

    def schedule(self, signal: Any, action: Any, state: jax.Array) -> tuple[Any, jax.Array]:
        return action, state + signal.emitting.astype(state.dtype)


def scripted(tokens: np.ndarray, widths: tuple[int, ...] = (1, 3)) -> Speculator:
    costs = jnp.ones(len(widths), jnp.float32)  # drafts are free: the law takes as many as it can
    script = Script(jnp.asarray(tokens, jnp.int32), jnp.float32(0.9))
    return Speculator(script, DraftLength(costs, widths=widths))


def run(
    drafts: Speculator | None,
    *,
    controller: Any = None,
    pages: int | None = None,
    width: int | None = None,
    stop: Any = (),
    max_tokens: Any = 30,
    **settings: Any,
) -> tuple[list[list[int]], Any, Any]:
    """The tokens of every row, the last state and the trace of one launch."""
    m, controller = model(), chain() if controller is None else controller
    texts = prompts(9, 16, 5, 17)
    pool = allocate(m.decoder.shape, ROWS, CONTEXT, page_size=PAGE, pages=pages)
    state = start(
        m.decoder,
        m.params,
        controller,
        pool,
        texts,
        key=jax.random.key(7),
        sample=parameters(ROWS, **{**SAMPLING, **settings}),
        max_tokens=max_tokens,
        stop=stop,
        speculator=drafts,
    )
    state, trace = generate(
        m.decoder, m.params, controller, state, 60, capacity=60, width=width, speculator=drafts
    )
    trace = jax.device_get(trace)
    return [trace.token[trace.emitted[:, row], row].tolist() for row in range(ROWS)], state, trace


def texts_of(rows: list[list[int]]) -> np.ndarray:
    """Prompts and answers by position, as a script."""
    script = np.zeros((ROWS, CONTEXT + 8), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts(9, 16, 5, 17), rows, strict=True)):
        script[row, : len(prompt) + len(answer)] = [*prompt, *answer]
    return script


@pytest.fixture(scope="module")
def plain():
    return run(None)


@pytest.fixture(scope="module")
def truth(plain):
    return texts_of(plain[0])


def corrupted(script: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """The script with a share of its tokens replaced."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(script.shape) < share, rng.integers(0, 96, script.shape), script)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 1.0, *exhaustive(0.0, 0.6)])
def test_the_tokens_are_those_of_plain_decoding(plain, truth, share):
    tokens, state, trace = run(scripted(corrupted(truth, share)))
    assert tokens == plain[0]
    passes = (trace.emitted & ~trace.from_draft).sum(0)
    if share == 0.0:  # three tokens a pass, as far as the pass is shared
        assert passes.sum() <= 0.4 * trace.emitted.sum()
    if share == 1.0:
        assert trace.from_draft.sum() <= 0.1 * trace.emitted.sum()
    chex.assert_trees_all_equal(state.length, plain[1].length)
    chex.assert_trees_all_equal(state.status, plain[1].status)
    chex.assert_trees_all_equal(state.history, plain[1].history)
    chex.assert_trees_all_equal(state.token, plain[1].token)


@pytest.mark.slow
def test_the_law_across_rows_sees_every_pass_in_which_a_row_emits(plain, truth):
    tokens, state, trace = run(scripted((truth + 1) % 96), controller=EmittingPasses())
    assert tokens == plain[0] and not trace.from_draft.any()
    np.testing.assert_array_equal(state.control, trace.emitted.sum(0))


@pytest.mark.parametrize("liar", ["adversarial", "absurd", *exhaustive("constant")])
def test_a_drafter_that_lies_changes_nothing(plain, truth, liar):
    script = {
        "constant": np.full_like(truth, 3),
        "adversarial": (truth + 1) % 96,
        "absurd": truth * 0 + 10**6,
    }
    tokens, _, trace = run(scripted(script[liar]))
    assert tokens == plain[0]
    assert liar == "constant" or not trace.from_draft.any()


def test_measurements_and_totals_are_those_of_plain_decoding(plain, truth):
    _, state, trace = run(scripted(corrupted(truth, 0.3)))
    for name in ("entropy", "tempered_entropy", "varentropy", "surprisal", "temperature", "kept_fraction"):
        for row in range(ROWS):
            np.testing.assert_allclose(
                getattr(trace, name)[trace.emitted[:, row], row],
                getattr(plain[2], name)[plain[2].emitted[:, row], row],
                atol=2e-5,
                err_msg=name,
            )
    chex.assert_trees_all_equal(state.ledger.steps, plain[1].ledger.steps)
    chex.assert_trees_all_close(state.ledger.entropic_time, plain[1].ledger.entropic_time, atol=1e-4)
    # Weights are read once for several tokens; arithmetic is spent on drafts that fail, too.
    assert (state.ledger.bytes_read < plain[1].ledger.bytes_read).all()
    assert (state.ledger.flops >= plain[1].ledger.flops * 0.99).all()


@pytest.mark.slow
def test_control_per_token_counts_accepted_tokens_only(truth):
    controller = presets.preset("micro").controller
    plain = run(None, controller=controller)
    tokens, state, _ = run(scripted(corrupted(texts_of(plain[0]), 0.4)), controller=controller)
    assert tokens == plain[0]
    chex.assert_trees_all_close(state.control, plain[1].control, atol=1e-4)


def test_rows_end_at_their_stop_tokens_and_limits(plain, truth):
    stop = [[row[11]] for row in plain[0]]
    limits = [30, 7, 1, 30]
    expected = run(None, stop=stop, max_tokens=limits)
    tokens, state, _ = run(scripted(truth), stop=stop, max_tokens=limits)
    assert tokens == expected[0]
    assert [len(row) for row in tokens][1:3] == [7, 1]
    chex.assert_trees_all_equal(state.status, expected[1].status)
    assert set(np.asarray(state.status).tolist()) == {STOPPED, FULL}


def test_a_row_fills_the_whole_cache(truth):
    expected = run(None, max_tokens=CONTEXT)
    tokens, state, _ = run(
        scripted(texts_of([row[: CONTEXT + 8 - 17] for row in expected[0]])), max_tokens=CONTEXT
    )
    assert tokens == expected[0]
    assert (np.asarray(state.length) <= CONTEXT).all()


@pytest.mark.slow
def test_drafts_shrink_where_pages_run_short(truth):
    """With a pool that holds the rows but no spare page, drafts shrink and no row stalls."""
    needed = sum(-(-(n - 1 + 12) // PAGE) for n in (9, 16, 5, 17))
    expected = run(None, max_tokens=12, pages=needed)
    tokens, state, _ = run(scripted(truth), max_tokens=12, pages=needed)
    assert tokens == expected[0]
    assert (np.asarray(state.status) != RUNNING).all()


@pytest.mark.slow
def test_the_first_rows_of_a_narrow_step(plain, truth):
    expected = run(None, width=2)
    tokens, _, trace = run(scripted(corrupted(truth, 0.3)), width=2)
    assert tokens == expected[0]
    assert trace.from_draft.any()


def test_failed_logits_end_a_row_and_no_other(plain, truth):
    m = model()
    broken = dict(m.params, lm_head=jax.tree.map(lambda x: x * jnp.nan, m.params["lm_head"]))
    pool = allocate(m.decoder.shape, ROWS, CONTEXT, page_size=PAGE)
    drafts = scripted(truth)
    state = start(
        m.decoder,
        m.params,
        chain(),
        pool,
        prompts(9, 16, 5, 17),
        key=jax.random.key(7),
        max_tokens=5,
        speculator=drafts,
    )
    state, trace = generate(m.decoder, broken, chain(), state, 60, capacity=60, speculator=drafts)
    assert not np.asarray(trace.emitted).any()
    assert (np.asarray(state.status) != RUNNING).all()


@pytest.mark.slow
def test_the_suffix_drafter_follows_repetition(plain):
    drafts = speculator(ROWS)
    drafts = Speculator(
        SuffixDrafter(drafts.drafter.acceptance, 5), DraftLength(jnp.array([1.0, 1.2]), widths=(1, 3))
    )
    greedy = {name: [value[0]] * ROWS for name, value in SAMPLING.items()}
    expected = run(None, max_tokens=44, **greedy)
    tokens, _, trace = run(drafts, max_tokens=44, **greedy)
    assert tokens == expected[0]
    assert trace.from_draft.sum() > 0.2 * trace.emitted.sum()  # greedy texts of a random model repeat


@pytest.mark.slow
@pytest.mark.parametrize("cascaded", [True, *exhaustive(False)])
def test_pruned_drafts_change_nothing(plain, cascaded):
    window = WindowPages(recent_pages=1, dense_layers=0)
    tables = jnp.array([0.9, 0.8], jnp.float32), jnp.array([2.0], jnp.float32)
    drafter: Any = PrunedDrafter(*tables, stop_below=0.5, shortest_context=0, pages=window, most_tokens=2)
    if cascaded:
        drafter = Cascade((SuffixDrafter(speculator(ROWS).drafter.acceptance, 2), drafter))
    drafts = Speculator(drafter, DraftLength(jnp.ones(2, jnp.float32), widths=(1, 3)))
    tokens, state, trace = run(drafts)
    assert tokens == plain[0]
    assert trace.from_draft.sum() > 0.3 * trace.emitted.sum()
    chex.assert_trees_all_equal(state.ledger.steps, plain[1].ledger.steps)
    assert (state.ledger.flops > plain[1].ledger.flops).all()  # drafts are charged


@pytest.mark.slow
def test_no_copy_of_the_cache_in_a_launch():
    """Neither drafts nor passes of several sizes copy the page pool."""
    m = model()
    sparse = PrunedDrafter(jnp.array([0.9]), jnp.zeros(0), shortest_context=0, most_tokens=2)
    drafter = Cascade((SuffixDrafter(speculator(2).drafter.acceptance, 2), sparse))
    drafts = Speculator(drafter, DraftLength(jnp.ones(2, jnp.float32), widths=(1, 3)))
    pool = allocate(m.decoder.shape, 2, 328, page_size=PAGE)
    state = start(
        m.decoder,
        m.params,
        chain(),
        pool,
        prompts(9, 5),
        key=jax.random.key(0),
        max_tokens=9,
        speculator=drafts,
    )
    shape = re.escape(f"f32[{','.join(map(str, state.cache.layers[0].keys.shape))}]")
    text = generate.lower(m.decoder, m.params, chain(), state, 5, speculator=drafts).compile().as_text()
    assert re.search(shape, text), "the shape of the pool does not occur: the test looks for the wrong thing"
    copies = re.findall(rf"= {shape}\S* (?:copy|select|transpose|copy-start)\(.*", text)
    assert not copies, copies


def test_what_cannot_be_combined_is_refused(plain):
    m = model()
    with pytest.raises(ValueError, match="state must be started with a speculator"):
        generate(m.decoder, m.params, chain(), plain[1], 1, speculator=speculator(ROWS))
    drafts = speculator(ROWS)
    state = plain[1]._replace(text=jnp.zeros((ROWS, CONTEXT), jnp.int32), speculation=drafts.init(ROWS))
    for changed, message in (
        (state._replace(page_policy=presets.FINE_PAGES), "page_policy must be None where tokens are drafted"),
        (state._replace(cache=state.cache._replace(surprisal=jnp.zeros(1))), "allocated without surprisals"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(m.decoder, m.params, chain(), changed, 1, speculator=drafts)
