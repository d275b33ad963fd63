"""Benchmark of the engine's overhead: the same sequences through `loop.generate` and through the engine.

    python -m benchmarks.serving_overhead [--model DIR] [--requests 64] [--tokens 128] [--repeats 5]

Both read the same prompts of random text and draw the same number of tokens. The two take turns; the medians
of the seconds are printed, and the time to the first token of a lone request and of a bare prefill.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.start import start
from entropic_jax.serving.options.compilation_cache import remember_compilations
from entropic_jax.serving.options.model import EMBEDDED

from .measure import engine_seconds, offline_seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=EMBEDDED)
    for name, value in (("requests", 64), ("prompt", 64), ("tokens", 128), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    remember_compilations()
    sizes: dict[str, Any] = dict(
        max_num_seqs=options.requests, max_model_len=2 * (options.prompt + options.tokens)
    )
    engine = start(options.model, EngineOptions(**sizes, enable_prefix_caching=False, warmup="full"))
    assert isinstance(engine, LLMEngine), "data_parallel_size is 1"
    while not engine.ready():
        time.sleep(0.1)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, engine.model.config.vocab_size, (options.requests, options.prompt)).tolist()
    offline, engine_times = [], []
    for _ in range(options.repeats + 1):  # the first of each is not counted
        offline.append(offline_seconds(engine, prompts, options.tokens))
        engine_times.append(engine_seconds(engine, prompts, options.tokens)[0])
    alone, serving = statistics.median(offline[1:]), statistics.median(engine_times[1:])
    total = options.requests * options.tokens
    print(f"loop    {alone:7.3f} s  {total / alone:8.0f} tokens/s")
    print(f"engine  {serving:7.3f} s  {total / serving:8.0f} tokens/s  {serving / alone - 1:+.1%}")
    low = [
        (offline_seconds(engine, prompts[:1], 1), engine_seconds(engine, prompts[:1], 4)[1])
        for _ in range(21)
    ][1:]
    prefill, first_token = (statistics.median(times) for times in zip(*low, strict=True))
    print(f"first token alone: loop {1e3 * prefill:.1f} ms, engine {1e3 * first_token:.1f} ms")
    print(f"programs compiled after the warm-up: {engine.compilations}")
    engine.close()


if __name__ == "__main__":
    main()
