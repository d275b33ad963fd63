"""compressed-tensors: integers and 8-bit or 4-bit floats with scales per tensor, row, group or block.

    w[i, j] = s[i, g(j)] · (q[i, j] − z[i, g(j)])

Integers of fewer than 8 bits share words of 32 bits along the inputs, moved by 2^(bits − 1) to be unsigned.
Zero points do so along the outputs. With NVFP4 a scale is divided by one number for the matrix.

`config_groups` may state several schemes. A matrix is read by the first scheme that fits its tensors.
"""

from typing import ClassVar, NamedTuple

import numpy as np

from ..config import ModelError, is_integer
from .fp4 import POWERS, decode
from .packing import WORD, unpack_range
from .scales import ScaleGrid, per_group, per_row, per_tensor
from .settings import Settings
from .stored import StoredTensor, as_float32
from .weight_format import (
    Parts,
    WeightFormat,
    require_dtype,
    require_floats,
    require_matrix,
    require_parts,
    require_shape,
)

FORMATS = (
    *("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"),
)
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
PACKED_BITS = (2, 4, 8)
LEAST_ACTIVATION_BITS = 8


class Scheme(NamedTuple):
    """How a group of matrices is quantised."""

    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int] | None

    def grid(self, out: int, inputs: int) -> ScaleGrid:
        """Which elements of a matrix share a scale."""
        if self.strategy == "tensor":
            return per_tensor(out, inputs)
        if self.strategy == "channel":
            return per_row(out, inputs)
        if self.strategy == "block" and self.block is not None:
            return ScaleGrid(out, inputs, *self.block)
        return per_group(out, inputs, self.group_size)


class CompressedTensors(WeightFormat):
    """Weights of quant_method "compressed-tensors".

    Args:
        settings: `quantization_config`.
    """

    endings: ClassVar = {
        ".weight": "weight",
        ".weight_packed": "packed",
        ".weight_scale": "scale",
        ".weight_zero_point": "zero_point",
        ".weight_shape": "shape",
        ".weight_g_idx": "g_idx",
        ".weight_global_scale": "global_scale",
    }
    anchor = "scale"

    def __init__(self, settings: Settings) -> None:
        settings.choice("format", FORMATS, "mixed-precision")
        sparsity = settings.part("sparsity_config")
        if sparsity is not None:
            sparsity.choice("format", ("dense",), "dense")
        settings.absent("transform_config")
        groups = settings.part("config_groups")
        if groups is None or not groups.fields:
            raise settings.refuse("config_groups", "an object of groups")
        parts = [Settings(value, f"{groups.name}.{name}") for name, value in groups.fields.items()]
        self.schemes = [scheme_of(part) for part in parts]
        self.activation_bits = min(filter(None, map(activation_bits, parts)), default=None)

    def shape(self, name: str, parts: Parts) -> tuple[int, ...]:
        errors = []
        for scheme in self.schemes:
            try:
                return checked_shape(name, parts, scheme)
            except ModelError as error:
                errors.append(error)
        raise errors[0]

    def rows(self, name: str, parts: Parts, rows: slice) -> np.ndarray:
        scheme = next(scheme for scheme in self.schemes if fits(name, parts, scheme))
        out, inputs = checked_shape(name, parts, scheme)
        grid = scheme.grid(out, inputs)
        order = input_groups(parts)
        spread = grid.spread if order is None else lambda selected: selected[:, order]
        values = quantised_values(parts, scheme, rows, inputs)
        if not scheme.symmetric:
            values = values - spread(zero_points(parts, scheme, rows, grid))
        stored = parts["scale"]
        scales = POWERS[stored[...]] if stored.dtype == "U8" else as_float32(stored)
        scales = grid.select(scales, rows)
        if "global_scale" in parts:
            scales = scales / as_float32(parts["global_scale"]).reshape(1, 1)
        return values * spread(scales)

    def int8_rows(self, name: str, parts: Parts) -> tuple[StoredTensor, np.ndarray] | None:
        scheme = next(scheme for scheme in self.schemes if fits(name, parts, scheme))
        narrow = "packed" not in parts and not scheme.is_float and scheme.symmetric
        if not narrow or scheme.strategy != "channel" or input_groups(parts) is not None:
            return None
        return parts["weight"], as_float32(parts["scale"]).reshape(-1)


def scheme_of(group: Settings) -> Scheme:
    """The scheme that an entry of config_groups states. Raises ModelError for one that is not read."""
    weights = group.part("weights")
    if weights is None:
        raise group.refuse("weights", "an object: a group without quantised weights is not read")
    kind = weights.choice("type", ("int", "float"), "int")
    bits = weights.choice("num_bits", (4, 8) if kind == "float" else PACKED_BITS, 8)
    weights.choice("dynamic", (False,), False)
    size = weights.group_size("group_size", -1)
    default = "tensor" if weights.fields.get("group_size") is None else "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", STRATEGIES, default)
    block = weights.block("block_structure")
    if strategy == "block" and block is None:
        raise weights.refuse("block_structure", "a list of two positive integers for the strategy 'block'")
    return Scheme(bits, kind == "float", weights.boolean("symmetric", True), strategy, size, block)


def activation_bits(group: Settings) -> int | None:
    """The bits of quantised activations; None without. Raises ModelError for fewer than 8."""
    result = None
    for field in ("input_activations", "output_activations"):
        part = group.part(field)
        if part is not None:
            bits = part.fields.get("num_bits", 8)
            if not is_integer(bits) or bits < LEAST_ACTIVATION_BITS:
                raise part.refuse(
                    "num_bits",
                    f"at least {LEAST_ACTIVATION_BITS}, because activations are not quantised here",
                )
            result = bits
    return result


def fits(name: str, parts: Parts, scheme: Scheme) -> bool:
    """Whether the tensors of a matrix are those of a scheme.

    Args:
        name: the name of the matrix.
        parts: the matrix's parts.
        scheme: the scheme that may have made the parts.
    """
    try:
        checked_shape(name, parts, scheme)
    except ModelError:
        return False
    return True


def checked_shape(name: str, parts: Parts, scheme: Scheme) -> tuple[int, int]:
    """The shape of a matrix of this scheme. Raises ModelError where its tensors do not fit.

    Args:
        name: the name of the matrix.
        parts: the matrix's parts.
        scheme: the scheme that made the parts.
    """
    if "packed" in parts:
        out, inputs = packed_shape(name, parts, scheme)
    else:
        require_parts(name, parts, "weight")
        out, inputs = require_matrix(name, parts["weight"])
        require_dtype(name, parts["weight"], "F8_E4M3" if scheme.is_float else "I8")
    grid, scale = scheme.grid(out, inputs), parts["scale"]
    shapes = (*grid.stored_shapes, *([(1,)] if grid.shape == (1, 1) else []))
    require_shape(f"{name}_scale", scale, *shapes)
    if scale.dtype not in (("F8_E4M3", "U8") if scheme.is_float else ()):
        require_floats(f"{name}_scale", scale)
    if not scheme.symmetric:
        require_parts(name, parts, "zero_point")
        zero_point, groups = parts["zero_point"], grid.shape[1]
        if "packed" in parts and scheme.strategy in ("group", "channel"):
            require_dtype(f"{name}_zero_point", zero_point, "I32")
            require_shape(f"{name}_zero_point", zero_point, (-(-out * scheme.bits // WORD), groups))
        else:
            require_dtype(f"{name}_zero_point", zero_point, "I8", "I16", "I32", "I64")
            require_shape(f"{name}_zero_point", zero_point, *shapes)
    elif "zero_point" in parts and np.any(parts["zero_point"][...]):
        raise ModelError(
            f"{scale.file}: {name}_zero_point must be absent or 0 where weights.symmetric is true"
        )
    if "global_scale" in parts:
        require_shape(f"{name}_global_scale", parts["global_scale"], (1,), ())
        require_floats(f"{name}_global_scale", parts["global_scale"])
    elif scheme.strategy == "tensor_group":
        require_parts(name, parts, "global_scale")
    if "g_idx" in parts:
        require_shape(f"{name}_g_idx", parts["g_idx"], (inputs,))
        require_dtype(f"{name}_g_idx", parts["g_idx"], "I32", "I64")
        order = input_groups(parts)
        if order is not None and not 0 <= order.min() <= order.max() < grid.shape[1]:
            raise ModelError(
                f"{scale.file}: {name}_g_idx must be from 0 to {grid.shape[1] - 1}; "
                f"got {order.min()} to {order.max()}"
            )
    return out, inputs


def packed_shape(name: str, parts: Parts, scheme: Scheme) -> tuple[int, int]:
    """The shape of a matrix whose elements share words or bytes.

    Args:
        name: the name of the matrix.
        parts: the matrix's parts.
        scheme: the scheme that made the parts.
    """
    packed = parts["packed"]
    out, width = require_matrix(f"{name}_packed", packed)
    require_dtype(f"{name}_packed", packed, "U8" if scheme.is_float else "I32")
    word = 8 if scheme.is_float else WORD
    if "shape" not in parts:
        return out, width * word // scheme.bits
    stored = parts["shape"]
    require_shape(f"{name}_shape", stored, (2,))
    require_dtype(f"{name}_shape", stored, "I64", "I32")
    shape = tuple(int(n) for n in stored[...])
    if shape[0] != out or -(-shape[1] * scheme.bits // word) != width:
        raise ModelError(
            f"{stored.file}: {name}_shape must fit {name}_packed, {packed.shape}, with {scheme.bits} bits; "
            f"got {shape}"
        )
    return out, shape[1]


def input_groups(parts: Parts) -> np.ndarray | None:
    """The group of every input; None where neighbours form groups."""
    if "g_idx" not in parts:
        return None
    order = parts["g_idx"][...]
    return None if np.all(order == -1) else order


def quantised_values(parts: Parts, scheme: Scheme, rows: slice, inputs: int) -> np.ndarray:
    """Rows of a matrix before they are scaled, int32 or float32.

    Args:
        parts: the parts of the matrix.
        scheme: the scheme that made the parts.
        rows: first row and the one after the last.
        inputs: columns of the matrix.
    """
    if "packed" not in parts:
        return as_float32(parts["weight"], rows)
    packed = parts["packed"][rows]
    if scheme.is_float:
        return decode(packed)[:, :inputs]
    return unpack_range(packed, scheme.bits, 1, slice(0, inputs)) - (1 << (scheme.bits - 1))


def zero_points(parts: Parts, scheme: Scheme, rows: slice, grid: ScaleGrid) -> np.ndarray:
    """The zero points of rows, `[rows, blocks across]`.

    Args:
        parts: the parts of the matrix.
        scheme: the scheme that made the parts.
        rows: first row and the one after the last.
        grid: the grid of elements that share a zero point.
    """
    stored = parts["zero_point"]
    if "packed" in parts and scheme.strategy in ("group", "channel"):
        return unpack_range(stored[...], scheme.bits, 0, rows) - (1 << (scheme.bits - 1))
    return grid.select(stored[...].astype(np.int32), rows)
