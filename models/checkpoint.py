"""Orbax checkpoints of any pytree of arrays: training state, the loop's State; bit for bit.

On disk there is one array per leaf, named by its path. Random keys are stored as the integers they consist of
and come back as keys of the same kind; arrays of size zero hold nothing to store.
"""

from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from .config import ModelError

Tree = TypeVar("Tree")


def save(path: str | Path, tree: Any) -> None:
    """Write a pytree of arrays, numbers and typed random keys to a directory, replacing what it held."""
    leaves = {name: plain(leaf) for name, leaf in named(tree).items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), {n: x for n, x in leaves.items() if x.size}, force=True)


def restore(path: str | Path, like: Tree) -> Tree:
    """Read the pytree that `save` wrote.

    `like` has its structure, shapes and dtypes: a value of it, or `jax.eval_shape` of what makes one. Raises
    ModelError where the directory is missing or holds something else.
    """
    directory, expected = Path(path).absolute(), named(like)
    stored = {name: abstract(leaf) for name, leaf in expected.items()}
    full = {name: leaf for name, leaf in stored.items() if leaf.size}
    if not directory.is_dir():
        raise ModelError(f"path must be a directory written by checkpoint.save; {directory} does not exist")
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored_arrays = dict(checkpointer.metadata(directory).item_metadata.tree)
        except (AttributeError, ValueError, FileNotFoundError) as error:
            raise ModelError(f"{directory} is not a checkpoint: {error}") from None
        check(directory, {n: (x.shape, x.dtype) for n, x in stored_arrays.items()}, full)
        arrays = checkpointer.restore(directory, full)
    empty = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in stored.items() if not leaf.size}
    leaves = [revive({**arrays, **empty}[name], leaf) for name, leaf in expected.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def check(directory: Path, stored_arrays: dict[str, Any], expected: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Raise ModelError, naming the first leaf that differs, unless a checkpoint holds the expected leaves.

    Args:
        directory: the directory of the checkpoint, for the message.
        stored_arrays: shape and dtype of each leaf of the checkpoint, by name.
        expected: those of `like`.
    """
    for name in sorted({*stored_arrays, *expected}):
        stored_form = stored_arrays.get(name)
        expected_form = (expected[name].shape, expected[name].dtype) if name in expected else None
        if stored_form is None or (tuple(stored_form[0]), stored_form[1]) != expected_form:
            raise ModelError(
                f"{directory}: {name} must be {form(expected_form)}, as in `like`; got {form(stored_form)}"
            )


def form(leaf: Any) -> str:
    """Dtype and shape of a leaf in one word, for messages."""
    return "absent" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def named(tree: Any) -> dict[str, Any]:
    """Leaves by path, in order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    stored_arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(stored_arrays) != len(leaves):
        raise ModelError("keys of the pytree must not contain dots: two leaves have the same path")
    return stored_arrays


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of random keys."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def plain(leaf: Any) -> jax.Array:
    """The leaf as an array of numbers, which random keys become."""
    return jax.random.key_data(leaf) if is_key(leaf) else jnp.asarray(leaf)


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a leaf as it is stored, to be put where the leaf is."""
    form = jax.eval_shape(plain, leaf)
    return jax.ShapeDtypeStruct(
        form.shape, form.dtype, sharding=None if is_key(leaf) else getattr(leaf, "sharding", None)
    )


def revive(stored: jax.Array, like: Any) -> jax.Array:
    """The stored leaf in the form of `like`: random keys again where it holds them."""
    if not is_key(like):
        return stored
    kind: list[Any] = []  # asked of a traced key, since an abstract one does not tell
    jax.eval_shape(lambda key: kind.append(jax.random.key_impl(key)), like)
    return jax.random.wrap_key_data(stored, impl=kind[0])
