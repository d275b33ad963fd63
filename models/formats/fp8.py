"""FP8: matrices of 8-bit floats with a scale per tensor, per row, or per block.

    w[i, j] = q[i, j] · s[i / 128, j / 128]

Source: DeepSeek-V3 (2024; arXiv 2412.19437), section 3.3. Differs from the paper: activations
keep their dtype.
"""

from typing import ClassVar

import numpy as np

from .scales import ScaleGrid, per_row, per_tensor
from .settings import Settings
from .stored import DTYPES, as_float32
from .weight_format import Parts, WeightFormat, require_dtype, require_matrix, require_parts, require_shape

BLOCK = (128, 128)


class FP8(WeightFormat):
    """Weights of quant_method "fp8" and "fbgemm_fp8".

    Args:
        settings: `quantization_config`.
    """

    endings: ClassVar = {".weight": "weight", ".weight_scale_inv": "scale", ".weight_scale": "scale"}
    anchor = "scale"

    def __init__(self, settings: Settings) -> None:
        settings.choice("fmt", ("e4m3", "float8_e4m3fn", "float8_e4m3"), "e4m3")
        settings.choice("activation_scheme", ("dynamic", "static"), "dynamic")
        settings.choice("expert_dtype", ("fp8",), "fp8")
        self.block = settings.block("weight_block_size")
        self.activation_bits = 8

    def grid(self, parts: Parts) -> ScaleGrid:
        """Which elements share a scale, by the shape of the scales."""
        (out, inputs), shape = parts["weight"].shape, parts["scale"].shape
        if np.prod(shape, dtype=int) == 1:
            return per_tensor(out, inputs)
        if shape in ((out,), (out, 1)):
            return per_row(out, inputs)
        return ScaleGrid(out, inputs, *(self.block or BLOCK))

    def shape(self, name: str, parts: Parts) -> tuple[int, ...]:
        require_parts(name, parts, "weight")
        weight, scale = parts["weight"], parts["scale"]
        shape = require_matrix(name, weight)
        require_dtype(name, weight, "F8_E4M3", "F8_E5M2")
        require_dtype(f"{name}_scale", scale, *DTYPES, "F8_E8M0")
        grid = self.grid(parts)
        shapes = grid.stored_shapes if grid.shape != (1, 1) else (scale.shape,)
        require_shape(f"{name}_scale", scale, *shapes)
        return shape

    def rows(self, name: str, parts: Parts, rows: slice) -> np.ndarray:
        grid = self.grid(parts)
        scales = grid.select(as_float32(parts["scale"]), rows)
        return as_float32(parts["weight"], rows) * grid.spread(scales)
