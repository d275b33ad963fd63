"""Reference model of the comparisons: a Llama of 25M parameters with random weights, and random prompts."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .weights import CONFIG, write_huggingface

if TYPE_CHECKING:
    from entropic_jax.analysis.ablation import Subject

SHARED_PROMPT_FROM = 65536  # prompt tokens of a batch from which on its rows share one prompt


def prepare_weights(parent: Path) -> Path:
    """The folder of the weights and their conversions below `parent`; written at the first call."""
    name = hashlib.sha256(json.dumps(CONFIG).encode()).hexdigest()[:12]
    directory = parent / f"llama-{name}"
    if not (directory / "huggingface" / "config.json").exists():
        write_huggingface(directory)
    return directory


def write_prompts(directory: Path, batch: int, context: int) -> tuple[str, str]:
    """Write random prompts, `int32 [batch, context]`.

    Args:
        directory: where to write.
        batch: number of rows.
        context: tokens of a row.

    Returns:
        The file of the prompts, and that of their first 2048 tokens, for compilation.
    """
    shared = batch * context > SHARED_PROMPT_FROM
    rows = np.random.default_rng(context).integers(0, CONFIG["vocab_size"], (1 if shared else batch, context))
    prompts = np.broadcast_to(rows, (batch, context)).astype(np.int32)
    paths = directory / f"prompts-{batch}-{context}.npy", directory / f"prompts-{batch}-{context}-warm.npy"
    np.save(paths[0], prompts)
    np.save(paths[1], prompts[:, :2048])
    return str(paths[0]), str(paths[1])


def random_model(quick: bool = False) -> "Subject":
    """The reference model in memory, for prompts of up to 65536 tokens; two of its layers if `quick`."""
    from entropic_jax import models
    from entropic_jax.analysis.ablation import Subject

    names = {*models.Config.__dataclass_fields__} - {"max_position_embeddings"}
    sizes = {k: v for k, v in CONFIG.items() if k in names and not k.endswith("token_id")}
    sizes |= {"num_hidden_layers": 2} if quick else {}
    config = models.Config(architecture=CONFIG["architectures"][0], max_position_embeddings=65536, **sizes)
    model = models.initialise(config, 0)
    return Subject(model.decoder, model.params)
