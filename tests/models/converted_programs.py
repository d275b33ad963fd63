"""Converts a tiny model on meshes of virtual devices and loads it on others: prints which arrays differ.

    python -m tests.models.converted_programs FOLDER bfloat16 int8 1 2 2x2

FOLDER holds the model; after it come dtype and quantization, or None. A mesh is its number of devices along
tensor, or those along tensor and expert. JAX fixes the number of devices when it starts, so the caller sets
XLA_FLAGS.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from entropic_jax import models
from entropic_jax.mesh import make_mesh


def mesh_of(name: str) -> Any:
    """A mesh by its sizes; None for one device."""
    tensor, experts = (int(size) for size in f"{name}x1".split("x")[:2])
    return None if tensor == experts == 1 else make_mesh(tensor, expert_parallel_size=experts)


def differences(actual: models.Model, expected: models.Model) -> list[str]:
    """The arrays of which a dtype, a sharding or a bit differs."""
    assert jax.tree.structure(actual.params) == jax.tree.structure(expected.params)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(actual.params), jax.tree.leaves(expected.params), strict=True
    )
    return [
        jax.tree_util.keystr(path)
        for (path, x), y in pairs
        if x.dtype != y.dtype
        or x.shape != y.shape
        or not x.sharding.is_equivalent_to(y.sharding, x.ndim)
        or np.asarray(x).tobytes() != np.asarray(y).tobytes()
    ]


def report(folder: Path, dtype: str, quantization: str | None, meshes: list[str]) -> dict[str, Any]:
    """What differs between a converted model and the original, for each mesh of conversion and of loading."""
    kinds: dict[str, Any] = dict(quantization=quantization, progress=False)
    originals = {name: models.load(folder / "model", dtype, mesh=mesh_of(name), **kinds) for name in meshes}
    result: dict[str, Any] = {}
    for first in meshes:
        output = folder / f"converted-{first}-{dtype}-{quantization}"
        try:
            models.convert(folder / "model", output, dtype, mesh=mesh_of(first), **kinds)
        except models.ModelError as error:
            result[first] = str(error)
            continue
        for second in meshes:
            actual = models.load(output, dtype, mesh=mesh_of(second), **kinds)
            result[f"{first} {second}"] = differences(actual, originals[second])
    return result


if __name__ == "__main__":
    folder, dtype, quantization, *meshes = sys.argv[1:]
    print(json.dumps(report(Path(folder), dtype, None if quantization == "None" else quantization, meshes)))
