"""Rotations that depend on the length of a text: cached prefixes, preemption, the last position."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from entropic_jax import models
from entropic_jax.models import Config, RopeScaling
from entropic_jax.serving.engine.engine import EngineOptions, LLMEngine
from entropic_jax.serving.engine.interface import EngineRequest
from entropic_jax.serving.engine.options import sizes
from entropic_jax.serving.options.control_options import Control
from entropic_jax.serving.request import Request
from tests.marks import exhaustive
from tests.models.oracle import generated

ORIGINAL, PAGE, STEPS = 16, 4, 18
LONGROPE = RopeScaling(
    "longrope",
    4.0,
    original_max_position_embeddings=ORIGINAL,
    short_factor=(1.0,) * 4,
    long_factor=(2.0, 4.0, 8.0, 16.0),
)
SCALINGS = {
    "longrope": LONGROPE,
    "dynamic": RopeScaling("dynamic", 4.0, original_max_position_embeddings=ORIGINAL),
}
OPTIONS = dict(max_num_seqs=3, block_size=PAGE, max_steps=4, warmup="none", scheduling_policy="fcfs")


def rope_model(directory: str, kind: str) -> models.Model:
    """A small model, sharp enough for another rotation to change its tokens."""
    config = Config("LlamaForCausalLM", 258, 32, 44, 2, 4, 2, rope_scaling=SCALINGS[kind])
    model = models.initialise(config, seed=3)
    params = {**model.params, "lm_head": {"kernel": 3 * model.params["lm_head"]["kernel"]}}
    tokenizer = models.Tokenizer.from_directory(Path(directory))
    return dataclasses.replace(model, params=params, tokenizer=tokenizer)


def tokens_of(engine: LLMEngine, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens after each prompt, all at once, and how many tokens of each were cached."""
    streams = [
        engine.submit(
            EngineRequest(
                id=str(i),
                request=Request(prompt=tuple(p), max_tokens=STEPS, temperature=0.0, ignore_eos=True),
                control=Control(),
            )
        )
        for i, p in enumerate(prompts)
    ]
    deltas = [list(stream) for stream in streams]
    return [[t.id for d in ds for t in d.tokens] for ds in deltas], [ds[-1].cached_tokens for ds in deltas]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 200, length).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", *exhaustive("longrope")])
def test_texts_of_other_rotations_share_no_pages(kind, directory):
    """A prefix cached in a short text is not that of a long one; the tokens are those of the loop alone."""
    model = rope_model(directory, kind)
    long = prompt(30)
    engine = LLMEngine(model, EngineOptions(**OPTIONS))
    try:
        (short_tokens,), _ = tokens_of(engine, [long[:12]])
        (long_tokens,), cached = tokens_of(engine, [long])
        assert cached == [0]
        (again,), cached = tokens_of(engine, [long])
        assert again == long_tokens and cached == [28]
        _, cached = tokens_of(engine, [long[:14]])
        assert cached == [8]  # pages of the 11 tokens before the one that is decoded
    finally:
        engine.close()
    assert short_tokens == generated(model, [long[:12]], STEPS)[0].tolist()
    assert long_tokens == generated(model, [long], STEPS)[0].tolist()


@pytest.mark.exhaustive
def test_preemption_keeps_the_rotation(directory):
    """Texts that grow beyond the original context are replayed, not prefilled with the other factors."""
    model = rope_model(directory, "longrope")
    prompts = [prompt(10, seed) for seed in range(3)]
    engine = LLMEngine(model, EngineOptions(**OPTIONS, num_pages=17))
    try:
        tokens, _ = tokens_of(engine, prompts)
        assert engine.snapshot()["preemptions"] > 0
    finally:
        engine.close()
    assert tokens == [generated(model, [p], STEPS)[0].tolist() for p in prompts]


def test_the_longest_sequence_is_that_of_the_model(directory):
    """`max_position_embeddings` is kept to the token, whatever the page size."""
    model = rope_model(directory, "longrope")
    for longest in (250, 257, 3):
        config = dataclasses.replace(model.config, max_position_embeddings=longest)
        limited = dataclasses.replace(model, config=config)
        result = sizes(limited, EngineOptions(**{**OPTIONS, "block_size": 16}), 4)
        assert result.context == longest and result.pages == 3 * -(-longest // 16)
    config = dataclasses.replace(model.config, max_position_embeddings=2**31 - 1)
    huge = sizes(dataclasses.replace(model, config=config), EngineOptions(**OPTIONS, num_pages=8), 4)
    assert huge.context == 8 * PAGE
