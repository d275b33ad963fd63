"""Interface of a format of quantised weights, and the tensor that it makes of their parts."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ..config import ModelError
from .settings import Settings
from .stored import DTYPES, StoredTensor

# Endings of tensors that only quantised activations or a quantised KV cache need. Neither is read from disk.
UNUSED = (
    *(".input_scale", ".activation_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale"),
    *(".output_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale"),
)
Parts = Mapping[str, StoredTensor]


class WeightFormat:
    """How a matrix [out, in] is stored in several tensors.

    A format names the endings of those tensors, checks them, and computes rows of the matrix in float32.

    Args:
        settings: `quantization_config`.
    """

    # Ending of a stored tensor's name: the part of the matrix that it holds.
    endings: ClassVar[Mapping[str, str]] = {}
    # Part that only quantised matrices have.
    anchor = ""
    # Bits of the activations that other programs quantise; None where they do not.
    activation_bits: int | None = None
    # Ending of the matrix's name in an unquantised model.
    dense = ".weight"

    def __init__(self, settings: Settings) -> None:
        pass

    def shape(self, name: str, parts: Parts) -> tuple[int, ...]:
        """The shape of the matrix. Raises ModelError where its parts do not fit together.

        Args:
            name: the name of the matrix.
            parts: the matrix's parts.
        """
        raise NotImplementedError

    def rows(self, name: str, parts: Parts, rows: slice) -> np.ndarray:
        """Rows of the matrix, float32.

        Args:
            name: the name of the matrix.
            parts: the matrix's parts.
            rows: first row and the one after the last.
        """
        raise NotImplementedError

    def int8_rows(self, name: str, parts: Parts) -> tuple[StoredTensor, np.ndarray] | None:
        """The matrix in int8 with a float32 scale per row, if that is how it is stored; None otherwise.

        Args:
            name: the name of the matrix.
            parts: the matrix's parts.
        """
        return None

    def dense_tensors(self, stored: Mapping[str, Any]) -> "dict[str, Any]":
        """The tensors of an unquantised model, of which quantised ones are computed as they are read."""
        stems: dict[str, dict[str, str]] = {}
        result: dict[str, Any] = {}
        for name in stored:
            ending = max((e for e in self.endings if name.endswith(e)), key=len, default=None)
            if ending is not None:
                stems.setdefault(name.removesuffix(ending), {})[self.endings[ending]] = name
            elif not name.endswith(UNUSED):
                result[name] = stored[name]
        for stem, names in stems.items():
            if self.anchor in names:
                parts = {part: stored[name] for part, name in names.items()}
                result[stem + self.dense] = DequantizedTensor(self, stem + self.dense, parts)
            else:
                result |= {name: stored[name] for name in names.values()}
        return result


class DequantizedTensor:
    """A matrix of which rows are dequantised when they are read.

    Args:
        weight_format: the format of its parts.
        name: the name of the matrix.
        parts: tensors that it consists of.
    """

    dtype = "F32"

    def __init__(self, weight_format: WeightFormat, name: str, parts: Parts) -> None:
        self.format, self.name, self.parts = weight_format, name, parts
        self.file = next(iter(parts.values())).file
        self.shape = weight_format.shape(name, parts)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Rows, `[rows]`, or those of a matrix of a stack, `[number, rows]`."""
        *lead, rows = index if isinstance(index, tuple) else (index,)
        parts = self.parts
        if lead:
            parts = {part: StoredTensor(t[lead[0]], t.dtype, t.file) for part, t in parts.items()}
        with np.errstate(over="ignore", invalid="ignore"):  # of scales that are damaged
            return self.format.rows(self.name, parts, slice(*rows.indices(self.shape[-2])[:2]))

    def int8_rows(self) -> tuple[StoredTensor, np.ndarray] | None:
        """The matrix in int8 with a float32 scale per row, if that is how it is stored; None otherwise."""
        return self.format.int8_rows(self.name, self.parts)

    def release(self) -> None:
        """See `release_pages`."""
        for part in self.parts.values():
            part.release()


def require_parts(name: str, parts: Parts, *required: str) -> None:
    """Raise ModelError unless a matrix has these parts.

    Args:
        name: the name of the matrix.
        parts: the parts that the matrix has.
        *required: names of the parts.
    """
    missing = [part for part in required if part not in parts]
    if missing:
        file = next(iter(parts.values())).file
        raise ModelError(f"{file}: {name} is quantised, but its {missing[0]} is missing")


def require_dtype(name: str, tensor: StoredTensor, *accepted: str) -> None:
    """Raise ModelError unless a part has a dtype of these codes.

    Args:
        name: the name of the part, for the message.
        tensor: the part.
        *accepted: codes.
    """
    if tensor.dtype not in accepted:
        raise ModelError(f"{tensor.file}: {name} must be of {', '.join(accepted)}; got {tensor.dtype}")


def require_floats(name: str, tensor: StoredTensor) -> None:
    require_dtype(name, tensor, *DTYPES)


def require_shape(name: str, tensor: StoredTensor, *accepted: tuple[int, ...]) -> None:
    """Raise ModelError unless a part has one of these shapes.

    Args:
        name: the name of the part, for the message.
        tensor: the part.
        *accepted: shapes.
    """
    if tensor.shape not in accepted:
        shapes = " or ".join(map(str, accepted))
        raise ModelError(f"{tensor.file}: {name} must have shape {shapes}; got {tensor.shape}")


def require_matrix(name: str, tensor: StoredTensor) -> tuple[int, int]:
    """The two lengths of a matrix. Raises ModelError for another number of axes, or an empty one."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise ModelError(f"{tensor.file}: {name} must be a matrix; got shape {tensor.shape}")
    return tensor.shape[0], tensor.shape[1]
