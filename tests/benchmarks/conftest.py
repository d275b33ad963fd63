"""Fixtures of the tests of benchmarks."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from entropic_jax.serving.options.model import EMBEDDED

LAYERS = 2


@pytest.fixture
def shallow(tmp_path) -> Path:
    """The first layers of the embedded model: fast to compile, though bad at writing."""
    import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "shallow"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "calibration.json"):
        shutil.copy(EMBEDDED / name, folder)
    config = json.loads((EMBEDDED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    weights = load_file(EMBEDDED / "model.safetensors")
    layer = lambda name: int(match[1]) if (match := re.search(r"layers\.(\d+)\.", name)) else 0
    kept = {name: np.ascontiguousarray(x) for name, x in weights.items() if layer(name) < LAYERS}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
