"""bitsandbytes: 4-bit codes of a table (NF4, FP4) in blocks of a flat matrix, and int8 with a scale per row.

The scales of the blocks may be quantised once more, to 8-bit codes of another table.

Source: Dettmers et al., QLoRA (2023; arXiv 2305.14314), section 3, and LLM.int8() (2022; arXiv 2208.07339),
section 2.
Differs from the papers: activations are not quantised, and outliers need no matrix of their own.
"""

import json
import math
from typing import Any, ClassVar

import numpy as np

from ..config import ModelError, abbreviate, is_integer, is_number
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

KINDS = ("nf4", "fp4")
LARGEST_STATE = 65536  # bytes
STATE = ".weight.quant_state.bitsandbytes__"


class Bitsandbytes(WeightFormat):
    """Weights of quant_method "bitsandbytes".

    Args:
        settings: `quantization_config`.
    """

    endings: ClassVar = {
        ".weight": "weight",
        ".SCB": "row_scale",
        ".weight_format": "layout",
        ".weight.absmax": "absmax",
        ".weight.quant_map": "table",
        ".weight.nested_absmax": "nested_absmax",
        ".weight.nested_quant_map": "nested_table",
        f"{STATE}nf4": "state",
        f"{STATE}fp4": "state",
    }

    def __init__(self, settings: Settings) -> None:
        self.four_bits = settings.boolean("load_in_4bit", False)
        eight = settings.boolean("load_in_8bit", False)
        if self.four_bits == eight:
            raise settings.refuse("load_in_4bit", "true, or load_in_8bit instead")
        settings.choice("bnb_4bit_quant_type", KINDS, "fp4")
        settings.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
        self.anchor = "state" if self.four_bits else "row_scale"
        self.activation_bits = None if self.four_bits else 8

    def shape(self, name: str, parts: Parts) -> tuple[int, ...]:
        require_parts(name, parts, "weight")
        weight = parts["weight"]
        if not self.four_bits:
            shape = require_matrix(name, weight)
            require_dtype(name, weight, "I8")
            require_floats(f"{name} SCB", parts["row_scale"])
            require_shape(f"{name} SCB", parts["row_scale"], shape[:1], (shape[0], 1))
            if "layout" in parts and np.any(parts["layout"][...]):
                raise ModelError(f"{weight.file}: {name} must be stored by rows (weight_format 0)")
            return shape
        require_parts(name, parts, "absmax", "table")
        state = read_state(name, parts["state"])
        out, inputs = state["shape"]
        count = out * inputs
        blocks = -(-count // state["blocksize"])
        require_dtype(name, weight, "U8")
        require_shape(name, weight, (-(-count // 2), 1), (-(-count // 2),))
        require_shape(f"{name}.absmax", parts["absmax"], (blocks,))
        require_shape(f"{name}.quant_map", parts["table"], (16,))
        require_floats(f"{name}.quant_map", parts["table"])
        if "nested_blocksize" not in state:
            require_floats(f"{name}.absmax", parts["absmax"])
            return out, inputs
        require_parts(name, parts, "nested_absmax", "nested_table")
        require_dtype(f"{name}.absmax", parts["absmax"], "U8")
        require_shape(f"{name}.nested_quant_map", parts["nested_table"], (256,))
        nested = -(-blocks // state["nested_blocksize"])
        require_shape(f"{name}.nested_absmax", parts["nested_absmax"], (nested,))
        for part in ("nested_absmax", "nested_table"):
            require_floats(f"{name} {part}", parts[part])
        return out, inputs

    def rows(self, name: str, parts: Parts, rows: slice) -> np.ndarray:
        if not self.four_bits:
            scale = as_float32(parts["row_scale"]).reshape(-1, 1)[rows] / 127
            return as_float32(parts["weight"], rows) * scale
        state = read_state(name, parts["state"])
        inputs, size = state["shape"][1], state["blocksize"]
        begin, end = rows.start * inputs, rows.stop * inputs  # of the flat matrix
        packed = parts["weight"].array.reshape(-1)[begin // 2 : -(-end // 2)]
        codes = np.stack((packed >> 4, packed & 15), axis=-1).reshape(-1)[begin % 2 :][: end - begin]
        blocks = slice(begin // size, -(-end // size))
        block = np.arange(begin, end) // size - blocks.start
        scales = block_scales(parts, state, blocks)[block]
        return (as_float32(parts["table"])[codes] * scales).reshape(-1, inputs)

    def int8_rows(self, name: str, parts: Parts) -> tuple[StoredTensor, np.ndarray] | None:
        if self.four_bits:
            return None
        return parts["weight"], as_float32(parts["row_scale"]).reshape(-1) / 127


def block_scales(parts: Parts, state: dict[str, Any], blocks: slice) -> np.ndarray:
    """The scales of some blocks, float32.

    Args:
        parts: the parts of the matrix.
        state: its `read_state`.
        blocks: first block and the one after the last.
    """
    if "nested_blocksize" not in state:
        return as_float32(parts["absmax"], blocks)
    outer = np.arange(blocks.start, blocks.stop) // state["nested_blocksize"]
    fine = as_float32(parts["nested_table"])[parts["absmax"][blocks]]
    return fine * as_float32(parts["nested_absmax"])[outer] + np.float32(state["nested_offset"])


def read_state(name: str, tensor: StoredTensor) -> dict[str, Any]:
    """The JSON that describes a 4-bit matrix. Raises ModelError for one that is not understood.

    Args:
        name: the name of the matrix.
        tensor: bytes of JSON.
    """
    place = f"{tensor.file}: quant_state of {name}"
    require_dtype(place, tensor, "U8")
    try:
        data = tensor[...].reshape(-1)[:LARGEST_STATE]
        state = json.loads(data.tobytes().decode())
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ModelError(f"{place} must be a JSON object of at most {LARGEST_STATE} bytes")
    shape = state.get("shape")
    valid = isinstance(shape, list) and len(shape) == 2 and all(is_integer(n) and n > 0 for n in shape)
    if not valid or math.prod(shape) > 2 * np.iinfo(np.int32).max:
        raise ModelError(f"{place}: shape must be two positive integers; got {abbreviate(shape)}")
    sizes = ["blocksize", *(["nested_blocksize"] if "nested_blocksize" in state else [])]
    for field in sizes:
        if not is_integer(state.get(field)) or state[field] < 1:
            raise ModelError(
                f"{place}: {field} must be a positive integer; got {abbreviate(state.get(field))}"
            )
    if len(sizes) == 2 and not is_number(state.get("nested_offset")):
        raise ModelError(
            f"{place}: nested_offset must be a number; got {abbreviate(state.get('nested_offset'))}"
        )
    return state
