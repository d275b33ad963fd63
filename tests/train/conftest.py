"""Fixtures of the training tests: an exported small model, its tokenizer, and the text of the tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from entropic_jax.models.train import corpus, data, export
from tests.train.model import SPARSE, TINY, random_params


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


@pytest.fixture(scope="session")
def params_with_experts() -> dict[str, Any]:
    return random_params(SPARSE)


@pytest.fixture(scope="session")
def exported_experts(
    tmp_path_factory: pytest.TempPathFactory, params_with_experts: dict[str, Any], tokenizer: Tokenizer
) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    export.export(params_with_experts, SPARSE, tokenizer, folder, step=7)
    return folder
