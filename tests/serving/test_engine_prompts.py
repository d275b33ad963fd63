"""Prompts in the engine: of any length they continue as in the loop, and short ones are scored."""

import jax
import pytest

from entropic_jax import chain, loop, parameters
from entropic_jax.state import cache
from tests.serving.test_engine import engine_request, exact, model, prompt, run  # noqa: F401  (fixtures)


def continued_in_the_loop(model, prompts, tokens, page, **sampling):  # noqa: F811
    """The greedy tokens of each prompt in the loop without the engine."""
    pool = cache.allocate(model.decoder.shape, len(prompts), 128, page_size=page)
    sample = parameters(len(prompts), temperature=0.0, **sampling)
    parts = model.decoder, model.params, chain()
    state = loop.start(*parts, pool, prompts, key=jax.random.key(0), max_tokens=tokens, sample=sample)
    return loop.generate(*parts, state, tokens, capacity=tokens)[1].token.T.tolist()


@pytest.mark.slow
def test_prompts_of_any_length_continue_as_in_the_loop(model, exact):  # noqa: F811
    page = exact.sizes.page_size
    prompts = [prompt(n, 40 + n) for n in (1, 2, page, page + 1, page + 2, 2 * page + 2)]
    expected = continued_in_the_loop(model, prompts, 6, page)
    for _ in range(2):  # the second time with cached prefixes
        requests = [engine_request(f"{len(p)}", p, max_tokens=6, temperature=0.0) for p in prompts]
        assert [tokens for tokens, _ in run(exact, *requests)] == expected


@pytest.mark.slow
def test_runs_are_penalised_as_in_the_loop(model, exact):  # noqa: F811
    """DRY knows the end of the prompt, in a row that a sequence without it has had before, too."""
    page = exact.sizes.page_size
    prompts = [(7, 8, 9) * n for n in (1, page // 2, page)]
    multipliers, lengths = [2.0, 0.5, 0.0], [1, 2, 2]
    expected = continued_in_the_loop(
        model, prompts, 24, page, dry_multiplier=multipliers, dry_allowed_length=lengths
    )

    def tokens_of(name, dry_multipliers):
        requests = [
            engine_request(
                f"{name} {number}",
                text,
                max_tokens=24,
                temperature=0.0,
                dry_multiplier=dry_multipliers[number],
                dry_allowed_length=lengths[number],
            )
            for number, text in enumerate(prompts)
        ]
        return [tokens for tokens, _ in run(exact, *requests)]

    plain = tokens_of("plain", [0.0] * 3)
    assert plain[:2] != expected[:2] and plain[2] == expected[2]
    assert tokens_of("penalised", multipliers) == expected


def test_a_prompt_of_one_token_is_scored(exact):  # noqa: F811
    deltas = list(exact.submit(engine_request("one", (5,), prompt_logprobs=1, max_tokens=2)))
    assert [(p.id, p.logprob) for d in deltas for p in d.prompt] == [(5, None)]


@pytest.mark.parametrize(
    ("phase", "scores"),
    [("_prefill", 64), ("_decode", 0)],  # the first of two chunks is collected, or still on the device
)
def test_a_prompt_preempted_while_it_is_scored_is_scored_once(exact, monkeypatch, phase, scores):  # noqa: F811
    """Its chunks are prefilled again, and the answer has every log-probability once."""
    scored = engine_request("scored", prompt(100, 7), prompt_logprobs=2, max_tokens=2)
    alone = list(exact.submit(scored))
    scheduler, then, scored_before = exact.scheduler, getattr(exact.scheduler, phase), []

    def preempt_in_prefill(*arguments, **options):
        begun = [s for s in scheduler.batch.prefilling if s.num_prefilled and not s.prompt_scored]
        if begun and not begun[0].preemptions and len(scheduler.batch.occupied) > 1:
            scheduler.collect_all()
            scored_before.append(len(begun[0].prompt_scores))
            scheduler._preempt()
            assert begun[0].row < 0
        return then(*arguments, **options)

    def scored_last(sequences, *_):
        return sorted(sequences, key=lambda s: s.engine_request.prompt_logprobs is not None)

    monkeypatch.setattr(scheduler, phase, preempt_in_prefill)
    monkeypatch.setattr(scheduler.ranking, "rank", scored_last)
    other = exact.submit(engine_request("other", prompt(20, 8), max_tokens=60))
    deltas = list(exact.submit(scored))
    assert len(list(other)) > 1
    assert deltas[-1].summary["preemptions"] == 1 and scored_before == [scores]
    assert [len(delta.prompt) for delta in deltas if delta.prompt] == [100]
    assert [p for d in deltas for p in d.prompt] == [p for d in alone for p in d.prompt]
    assert [t.id for d in deltas for t in d.tokens] == [t.id for d in alone for t in d.tokens]
