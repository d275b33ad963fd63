"""A random model small enough to export, score and evaluate in a test, and a tokenizer for it."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer

from models.train import corpus, data, export
from models.train.__main__ import Shape, initialise

TINY = Shape(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
)


def random_params(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Parameters in which nothing is zero or one, rounded to bfloat16 as an export rounds them."""
    rng = np.random.default_rng(seed)
    params = initialise(shape, seed)
    for layer in params["layers"]:
        for name, value in layer.items():
            noise = 0.2 * rng.standard_normal(value.shape)
            layer[name] = value + noise.astype(np.float32)
    params["embed_tokens"] *= 20
    return jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Five modules of the standard library, as training text."""
    names = ("textwrap", "heapq", "bisect", "shlex", "csv")
    folder = Path(json.__file__).parents[1]
    return [(folder / f"{name}.py").read_text("utf-8") for name in names]


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    documents = [corpus.Document("python", str(i), text) for i, text in enumerate(texts)]
    return data.train_tokenizer(documents, TINY.vocab_size)


@pytest.fixture(scope="session")
def params() -> dict[str, Any]:
    return random_params(TINY)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, params: dict[str, Any], tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export.export(params, TINY, tokenizer, folder, step=7)
    return folder
