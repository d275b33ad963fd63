"""Prompts in the engine: of any length they continue as in the loop, and short ones are scored."""

import jax

from entropic_jax import cache, chain, loop, parameters
from tests.serving.test_engine import engine_request, exact, model, prompt, run  # noqa: F401  (fixtures)


def test_prompts_of_any_length_continue_as_in_the_loop(model, exact):  # noqa: F811
    page = exact.sizes.page_size
    prompts = [prompt(n, 40 + n) for n in (1, 2, page, page + 1, page + 2, 2 * page + 2)]
    pool = cache.allocate(model.decoder.shape, len(prompts), 128, page_size=page)
    state = loop.start(
        model.decoder,
        model.params,
        chain(),
        pool,
        prompts,
        key=jax.random.key(0),
        max_tokens=6,
        sample=parameters(len(prompts), temperature=0.0),
    )
    _, trace = loop.generate(model.decoder, model.params, chain(), state, 6, capacity=6)
    expected = trace.token.T.tolist()
    for _ in range(2):  # the second time with cached prefixes
        requests = [engine_request(f"{len(p)}", p, max_tokens=6, temperature=0.0) for p in prompts]
        assert [tokens for tokens, _ in run(exact, *requests)] == expected


def test_a_prompt_of_one_token_is_scored(exact):  # noqa: F811
    deltas = list(exact.submit(engine_request("one", (5,), prompt_logprobs=1, max_tokens=2)))
    assert [(p.id, p.logprob) for d in deltas for p in d.prompt] == [(5, None)]
