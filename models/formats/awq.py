"""AWQ: 4-bit integers with a scale and a zero point per group of inputs, in the layout "gemm".

    w[o, i] = s[g(i), o] · (q[i, o] − z[g(i), o])

Eight outputs share a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.

Source: Lin et al., AWQ (2023; arXiv 2306.00978), section 4.
"""

from typing import ClassVar

import numpy as np

from .packing import WORD, unpack
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

BITS, PER_WORD = 4, WORD // 4
PLACES = np.argsort((0, 2, 4, 6, 1, 3, 5, 7))  # of the outputs 0 to 7 in a word


class AWQ(WeightFormat):
    """Weights of quant_method "awq".

    Args:
        settings: `quantization_config`.
    """

    endings: ClassVar = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales"}
    anchor = "qweight"

    def __init__(self, settings: Settings) -> None:
        settings.choice("bits", (BITS,), settings.choice("w_bit", (BITS,), BITS))
        size = settings.group_size("q_group_size", 128)
        self.group_size = settings.group_size("group_size", size)
        for field in ("version", "format"):
            settings.choice(field, ("gemm", "GEMM"), "gemm")

    def shape(self, name: str, parts: Parts) -> tuple[int, ...]:
        require_parts(name, parts, "qweight", "scales")
        stem = name.removesuffix(".weight")
        inputs, words = require_matrix(f"{stem}.qweight", parts["qweight"])
        groups = -(-inputs // self.size(inputs))
        require_dtype(f"{stem}.qweight", parts["qweight"], "I32", "U32")
        require_floats(f"{stem}.scales", parts["scales"])
        require_shape(f"{stem}.scales", parts["scales"], (groups, words * PER_WORD))
        require_parts(name, parts, "qzeros")
        require_dtype(f"{stem}.qzeros", parts["qzeros"], "I32", "U32")
        require_shape(f"{stem}.qzeros", parts["qzeros"], (groups, words))
        return words * PER_WORD, inputs

    def size(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size

    def rows(self, name: str, parts: Parts, rows: slice) -> np.ndarray:
        integers, zeros = (outputs(parts[part], rows) for part in ("qweight", "qzeros"))
        group = np.arange(len(integers)) // self.size(len(integers))
        scales = as_float32(parts["scales"], (slice(None), rows))
        return ((integers - zeros[group]) * scales[group]).T


def outputs(packed: StoredTensor, rows: slice) -> np.ndarray:
    """The integers of some outputs, `[inputs or groups, outputs]`.

    Args:
        packed: eight outputs to a word.
        rows: first output and the one after the last.
    """
    first = rows.start // PER_WORD
    values = unpack(packed[:, first : -(-rows.stop // PER_WORD)], BITS, axis=1)
    ordered = values.reshape(len(values), -1, PER_WORD)[..., PLACES].reshape(len(values), -1)
    return ordered[:, rows.start - first * PER_WORD : rows.stop - first * PER_WORD]
