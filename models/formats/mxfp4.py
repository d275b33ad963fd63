"""MXFP4: the experts of gpt-oss, in blocks of 32 4-bit floats with a power of two as the scale.

Source: OCP Microscaling Formats (MX) Specification 1.0 (2023), section 5; gpt-oss (arXiv 2508.10925).
"""

from typing import ClassVar

import numpy as np

from ..config import ModelError
from .fp4 import POWERS, decode
from .weight_format import Parts, WeightFormat, require_dtype, require_parts, require_shape

BLOCK = 32


class MXFP4(WeightFormat):
    """Weights of quant_method "mxfp4": stacks `[experts, in, out]`, of which blocks lie along `in`."""

    endings: ClassVar = {"_blocks": "blocks", "_scales": "scales"}
    anchor = "blocks"
    dense = ""

    def shape(self, name: str, parts: Parts) -> tuple[int, ...]:
        require_parts(name, parts, "blocks", "scales")
        blocks, scales = parts["blocks"], parts["scales"]
        require_dtype(f"{name}_blocks", blocks, "U8")
        require_dtype(f"{name}_scales", scales, "U8", "F8_E8M0")
        if len(blocks.shape) != 4 or blocks.shape[-1] != BLOCK // 2 or 0 in blocks.shape:
            raise ModelError(
                f"{blocks.file}: {name}_blocks must have shape (experts, out, blocks, 16); got {blocks.shape}"
            )
        experts, out, count, _ = blocks.shape
        require_shape(f"{name}_scales", scales, (experts, out, count))
        return experts, count * BLOCK, out

    def rows(self, name: str, parts: Parts, rows: slice) -> np.ndarray:
        first = rows.start // BLOCK
        part = slice(first, -(-rows.stop // BLOCK))
        values = decode(parts["blocks"][:, part]) * POWERS[parts["scales"][:, part]][..., None]
        return values.reshape(len(values), -1)[:, rows.start - first * BLOCK : rows.stop - first * BLOCK].T
