"""What the engine costs over the bare loop: the same sequences through `loop.generate` and through jobs.

    python -m benchmarks.serving_overhead [--model DIR] [--requests 64] [--tokens 128] [--repeats 5]

Both read the same prompts of random text and draw the same number of tokens; the two take turns, and the
medians of the seconds are printed, with the engine's time of a first token at low load beside a bare prefill.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from entropic_jax import allocate, chain, loop, parameters
from entropic_jax.serving.compilation import remember_compilations
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine, start
from entropic_jax.serving.engine.interface import EngineRequest
from entropic_jax.serving.generation import EMBEDDED
from entropic_jax.serving.request import Request
from entropic_jax.state import RUNNING


def bare(engine: LLMEngine, prompts: list[list[int]], tokens: int) -> float:
    """Seconds of the loop alone, prompts included."""
    model, rows = engine.model, len(prompts)
    context = -(-(max(map(len, prompts)) + tokens) // engine.sizes.page_size) * engine.sizes.page_size
    pool = allocate(model.decoder.shape, rows, context, page_size=engine.sizes.page_size)
    jax.block_until_ready(pool)
    begun = time.perf_counter()
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
    return time.perf_counter() - begun


def served(engine: LLMEngine, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Seconds of the engine until every delta is read, and until the first of them."""
    begun, first = time.perf_counter(), None
    asked = [Request(prompt=p, max_tokens=tokens, ignore_eos=True, seed=i) for i, p in enumerate(prompts)]
    output_streams = [
        engine.submit(EngineRequest(id=str(i), request=request)) for i, request in enumerate(asked)
    ]
    count = 0
    for output_stream in output_streams:
        for delta in output_stream:
            first = first or time.perf_counter()
            count += len(delta.tokens)
    assert count == tokens * len(prompts), count
    return time.perf_counter() - begun, (first or begun) - begun


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", type=Path, default=EMBEDDED)
    for name, value in (("requests", 64), ("prompt", 64), ("tokens", 128), ("repeats", 5)):
        options.add_argument(f"--{name}", type=int, default=value)
    given = options.parse_args()
    remember_compilations()
    sizes: dict[str, Any] = dict(max_num_seqs=given.requests, max_model_len=2 * (given.prompt + given.tokens))
    engine = start(given.model, EngineOptions(**sizes, enable_prefix_caching=False, warmup="full"))
    while not engine.ready():
        time.sleep(0.1)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, engine.model.config.vocab_size, (given.requests, given.prompt)).tolist()
    loops, engines = [], []
    for _ in range(given.repeats + 1):  # the first of each is not counted
        loops.append(bare(engine, prompts, given.tokens))
        engines.append(served(engine, prompts, given.tokens)[0])
    alone, serving = statistics.median(loops[1:]), statistics.median(engines[1:])
    total = given.requests * given.tokens
    print(f"loop    {alone:7.3f} s  {total / alone:8.0f} tokens/s")
    print(f"engine  {serving:7.3f} s  {total / serving:8.0f} tokens/s  {serving / alone - 1:+.1%}")
    low = [(bare(engine, prompts[:1], 1), served(engine, prompts[:1], 4)[1]) for _ in range(21)][1:]
    reading, answered = (statistics.median(times) for times in zip(*low, strict=True))
    print(f"first token alone: loop {1e3 * reading:.1f} ms, engine {1e3 * answered:.1f} ms")
    print(f"programs compiled after the warm-up: {engine.compilations}")
    engine.close()


if __name__ == "__main__":
    main()
