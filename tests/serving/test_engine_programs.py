"""Compiled programs of the engine: a full warm-up compiles all, and none copies the page pool."""

import pytest

from entropic_jax.serving.options.control_options import Control
from entropic_jax.speculation.draft_length import draft_length
from tests.serving.test_engine import (  # noqa: F401  (fixtures)
    WARM,
    copies_no_pool,
    engine_of,
    engine_request,
    exact,
    model,
    prompt,
    run,
)


@pytest.mark.slow
def test_nothing_is_compiled_after_a_full_warm_up(model):  # noqa: F811
    for engine in engine_of(model, max_num_seqs=2, warmup="full", num_pages=48, batch_invariant=False):
        assert engine.warmup.ended.wait(300)
        gains = (("dropped_mass_limit", 0.3), ("lowest_dropped_mass_limit", 0.3))
        engine_requests = [
            engine_request(
                f"j{i}",
                prompt(10 + 20 * i, i),
                max_tokens=60,
                seed=i,
                presence_penalty=0.1 * (i == 1),
                **WARM,
            )
            for i in range(3)
        ]
        run(
            engine,
            *engine_requests,
            engine_request("full", prompt(60, 3), Control("full-lossy", gains), prompt_logprobs=2),
        )
        assert engine.compilations == 0


@pytest.mark.slow
def test_no_program_copies_the_pool(exact):  # noqa: F811
    run(
        exact,
        engine_request("one", prompt(20)),
        engine_request("two", prompt(90, 1), Control("full-lossy"), presence_penalty=0.5),
    )
    copies_no_pool(exact, "apply", "prefill", "decode")


@pytest.mark.exhaustive
def test_a_full_warm_up_times_passes_and_compiles_all_that_drafts_need(model):  # noqa: F811
    options = dict(max_num_seqs=2, warmup="full", num_pages=48, batch_invariant=False, speculate="suffix")
    for engine in engine_of(model, **options):
        assert engine.warmup.ended.wait(300)
        laws = dict(engine.programs._laws())
        assert sorted(laws) == [1, 2]
        for rows, law in laws.items():
            assert law.costs.shape == (len(law.widths),) and (law.costs > 0).any()
            assert law.costs.tolist() != draft_length(rows, widths=law.widths).costs.tolist()
        run(
            engine, *(engine_request(f"j{i}", [7, 8, 9] * 5, max_tokens=40, seed=i, **WARM) for i in range(3))
        )
        assert engine.compilations == 0
