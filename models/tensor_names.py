"""Names of tensors on disk: which tensors an array of Params is made of, and which part of each.

One rule names the tensor of an array: its path in Params joined by dots under `model.`, where a `kernel` is
stored transposed as `weight`. Exceptions: the output projection has no `model.`, experts are one tensor each
on disk and stacked in memory, and a family may spell parts of a name differently, fuse several arrays into
one tensor, or stack the experts on disk (see `block_spec.Family`).
"""

import math
from typing import Any, NamedTuple

import jax

from .block_spec import Family
from .config import Config
from .decoder import FAMILIES, structure

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Piece(NamedTuple):
    """A part of a tensor on disk that is a matrix or vector in memory."""

    name: str
    stored_shape: tuple[int, ...]  # of the tensor
    transposed: bool  # whether the matrix in memory is the transpose of the part
    expert: int | None = None  # first index of a tensor that holds all experts, or of a matrix of one row
    outputs: slice = slice(None)  # along the axis of the outputs, the last one unless `transposed`
    inputs: slice = slice(None)  # along the other axis of a matrix

    def within(self, region: tuple[slice, ...]) -> "Piece":
        """The piece of a region.

        Args:
            region: first and last index along each axis of the matrix or vector in memory.

        >>> Piece("w", (12, 8), True, outputs=slice(4, 12, 2)).within((slice(0, 8), slice(1, 3))).outputs
        slice(6, 9, 2)
        """
        if not region:
            return self
        *inputs, outputs = region
        axis = -1 if not self.transposed else 0 if self.expert is None else 1
        first, _, step = self.outputs.indices(self.stored_shape[axis])
        chosen = slice(first + outputs.start * step, first + (outputs.stop - 1) * step + 1, step)
        return self._replace(outputs=chosen, inputs=inputs[0] if inputs else slice(None))


class ParameterSource(NamedTuple):
    """An array of Params and the tensors on disk that it is made of: one, or one per expert."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]  # in memory
    pieces: tuple[Piece, ...]

    @property
    def is_kernel(self) -> bool:
        """Whether the parameter is the matrix of a linear layer."""
        return self.path[-1] == "kernel"


def entries(config: Config) -> list[ParameterSource]:
    """The parts of a Config's Params, in order of reading."""
    family = FAMILIES[config.architecture]
    leaves, _ = jax.tree_util.tree_flatten_with_path(structure(config)[1])
    shapes = {tuple(getattr(k, "idx", getattr(k, "key", None)) for k in keys): x.shape for keys, x in leaves}
    return [
        ParameterSource(path, shape, pieces(path, shapes, config, family)) for path, shape in shapes.items()
    ]


def pieces(
    path: tuple[Any, ...], shapes: dict[tuple[Any, ...], tuple[int, ...]], config: Config, family: Family
) -> tuple[Piece, ...]:
    """The tensors of one array.

    Args:
        path: the path of the array in Params.
        shapes: the shapes of all arrays, by path.
        config: the model's configuration.
        family: the family of the model.
    """
    shape, module, kernel = shapes[path], str(path[-2]), path[-1] == "kernel"
    if path == ("lm_head", "kernel") and config.tie_word_embeddings:
        return (Piece(EMBEDDING, shape[::-1], True),)
    in_experts = "experts" in path
    each = shape[1:] if in_experts else shape  # of one expert's matrix or vector
    if not each:
        return (Piece(tensor_name(path, family), (), False),)
    outputs, part, total = each[-1], slice(None), each[-1]
    for fused, members in family.fused:
        paths = [(*path[:-2], member, path[-1]) for member in members]
        concerned = in_experts or not family.fused_in_experts
        if concerned and module in members and all(p in shapes for p in paths):
            widths = [shapes[p][-1] for p in paths]
            place, total, module = members.index(module), sum(widths), fused
            part = slice(sum(widths[:place]), sum(widths[:place]) + outputs)
            if in_experts and family.interleaved_experts:
                part = slice(place, None, len(members))
    name = tensor_name((*path[:-2], module, path[-1]), family)
    as_multiplied = in_experts and family.experts_as_multiplied
    stored = (*each[:-1], total)
    stored = stored if as_multiplied or not kernel else stored[::-1]
    transposed = kernel and not as_multiplied
    if path[-1] in family.rows:
        return (Piece(name, (1, *stored), False, 0, part),)
    if not in_experts:
        return (Piece(name, stored, transposed, None, part),)
    experts = range(shape[0])
    if family.stacked_experts:
        return tuple(Piece(name, (len(experts), *stored), transposed, e, part) for e in experts)
    return tuple(
        Piece(name.replace(".experts.", f".experts.{e}."), stored, transposed, None, part) for e in experts
    )


def tensor_name(path: tuple[Any, ...], family: Family) -> str:
    """The name on disk of an array at this path of Params."""
    parts = [str(part) for part in path[:-1]] + ["weight" if path[-1] == "kernel" else str(path[-1])]
    name = ".".join(parts if path[0] == "lm_head" else ["model", *parts])
    for ours, theirs in family.renames:
        name = name.replace(ours, theirs)
    return name


def parameters(config: Config) -> int:
    """How many numbers Params of a Config hold."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structure(config)[1]))
