"""Seconds of the same sequences through the offline loop and through the engine."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from entropic_jax import allocate, chain, loop, parameters
from entropic_jax.serving.engine.engine import LLMEngine
from entropic_jax.serving.engine.interface import EngineRequest
from entropic_jax.serving.request import Request
from entropic_jax.state import RUNNING


def offline_seconds(engine: LLMEngine, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of the offline loop, prefill included.

    Args:
        engine: whose model and page size are used.
        prompts: token ids of each sequence.
        tokens: to generate for each.
    """
    model, rows = engine.model, len(prompts)
    context = -(-(max(map(len, prompts)) + tokens) // engine.sizes.page_size) * engine.sizes.page_size
    pool = allocate(model.decoder.shape, rows, context, page_size=engine.sizes.page_size)
    # The engine's cache has been in use, so this one has its memory, too.
    pool = jax.block_until_ready(pool._replace(layers=jax.tree.map(jnp.zeros_like, pool.layers)))
    begin = time.perf_counter()
    state = loop.start(
        model.decoder,
        model.params,
        chain(),
        pool,
        prompts,
        key=jax.random.key(0),
        max_tokens=tokens,
        sample=parameters(rows),
    )
    while (np.asarray(state.status) == RUNNING).any():
        state, _ = loop.generate(model.decoder, model.params, chain(), state, 64)
    return time.perf_counter() - begin


def engine_seconds(engine: LLMEngine, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Seconds of the engine until every output is read, and until the first one.

    Args:
        engine: runs the sequences.
        prompts: token ids of each sequence.
        tokens: to generate for each.
    """
    begin, first = time.perf_counter(), None
    requests = [Request(prompt=p, max_tokens=tokens, ignore_eos=True, seed=i) for i, p in enumerate(prompts)]
    output_streams = [
        engine.submit(EngineRequest(id=str(i), request=request)) for i, request in enumerate(requests)
    ]
    count = 0
    for output_stream in output_streams:
        for delta in output_stream:
            first = first or time.perf_counter()
            count += len(delta.tokens)
    assert count == tokens * len(prompts), count
    return time.perf_counter() - begin, (first or begin) - begin
