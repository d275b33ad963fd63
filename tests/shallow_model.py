"""The first layers of the embedded model: quick to compile, though bad at writing."""

import json
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from entropic_jax.serving.options.model import EMBEDDED

LAYERS = 2
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "calibration.json")
_folders: list[tempfile.TemporaryDirectory] = []  # deleted when the process ends


@cache
def shallow_model() -> Path:
    """The directory of the model; the tests of a process share it."""
    import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16
    from safetensors.numpy import load_file, save_file

    _folders.append(tempfile.TemporaryDirectory(prefix="shallow-", ignore_cleanup_errors=True))
    folder = Path(_folders[-1].name)
    for name in FILES:
        shutil.copy(EMBEDDED / name, folder)
    config = json.loads((EMBEDDED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    weights = load_file(EMBEDDED / "model.safetensors")
    layer = lambda name: int(match[1]) if (match := re.search(r"layers\.(\d+)\.", name)) else 0
    kept = {name: np.ascontiguousarray(x) for name, x in weights.items() if layer(name) < LAYERS}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
