"""Orbax checkpoints of any pytree of arrays: training state, the loop's State; bit for bit.

Random keys are stored as the integers they consist of, and come back as keys of the same kind.
"""

from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from .config import ModelError

Tree = TypeVar("Tree")


def save(path: str | Path, tree: Any) -> None:
    """Write a pytree of arrays, numbers and typed random keys to a directory, replacing what it held."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), jax.tree.map(plain, tree), force=True)


def restore(path: str | Path, like: Tree) -> Tree:
    """Read the pytree that `save` wrote.

    `like` has its structure, shapes and dtypes: a value of it, or `jax.eval_shape` of what makes one. Raises
    ModelError where the directory is missing or holds something else.
    """
    directory = Path(path).absolute()
    if not directory.is_dir():
        raise ModelError(f"{directory} is missing; accepted: a directory written by checkpoint.save")
    wanted = jax.tree.map(lambda leaf: jax.eval_shape(plain, leaf), like)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            stored = checkpointer.restore(directory, wanted)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise ModelError(f"{directory} does not hold the pytree asked for: {error}") from error
    return jax.tree.map(revive, stored, like)


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else jax.numpy.asarray(leaf)


def revive(stored: jax.Array, like: Any) -> Any:
    return jax.random.wrap_key_data(stored, impl=like.dtype._impl.name) if is_key(like) else stored
