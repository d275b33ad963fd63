"""GPTQ: integers of 2, 3, 4 or 8 bits with a scale and a zero point per group of inputs.

    w[o, i] = s[g(i), o] · (q[i, o] − z[g(i), o])

Eight 4-bit integers share a word, and 32 3-bit ones three words, along the inputs in `qweight` and along the
outputs in `qzeros`. `g_idx`
states the group of every input; without it, neighbours form groups. The older layout ("gptq") stores z − 1,
the newer ("gptq_v2") z.

Source: Frantar et al., GPTQ (2022; arXiv 2210.17323), sections 3 and 5.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..config import ModelError
from .packing import WORD, unpack, unpack_range
from .settings import Settings
from .stored import as_float32
from .weight_format import (
    Parts,
    WeightFormat,
    require_dtype,
    require_floats,
    require_matrix,
    require_parts,
    require_shape,
)

BITS = (2, 3, 4, 8)


class GPTQ(WeightFormat):
    """Weights of quant_method "gptq".

    Args:
        settings: `quantization_config`.
    """

    endings: ClassVar = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales", ".g_idx": "g_idx"}
    anchor = "qweight"

    def __init__(self, settings: Settings) -> None:
        self.bits = settings.choice("bits", BITS)
        self.group_size = settings.group_size("group_size", 128)
        layouts = ("gptq", "gptq_v2")
        layout = settings.choice("checkpoint_format", layouts, settings.choice("format", layouts, "gptq"))
        self.offset = 1 if layout == "gptq" else 0
        self.reordered = settings.boolean("desc_act", False)
        settings.choice("pack_dtype", ("int32",), "int32")
        # Rules that only leave modules out say what the tensors say, too.
        rules = settings.fields.get("dynamic") or {}
        if not isinstance(rules, Mapping) or not all(str(rule).startswith("-:") for rule in rules):
            settings.absent("dynamic")
        settings.absent("is_marlin_format", "rotation")

    def shape(self, name: str, parts: Parts) -> tuple[int, ...]:
        require_parts(name, parts, "qweight", "qzeros", "scales")
        stem = name.removesuffix(".weight")
        words, out = require_matrix(f"{stem}.qweight", parts["qweight"])
        inputs = words * WORD // self.bits
        size = inputs if self.group_size == -1 else self.group_size
        groups = -(-inputs // size)
        for part in ("qweight", "qzeros"):
            require_dtype(f"{stem}.{part}", parts[part], "I32", "U32")
        require_floats(f"{stem}.scales", parts["scales"])
        require_shape(f"{stem}.scales", parts["scales"], (groups, out))
        require_shape(f"{stem}.qzeros", parts["qzeros"], (groups, -(-out * self.bits // WORD)))
        if self.reordered and groups > 1:
            require_parts(name, parts, "g_idx")
        if "g_idx" in parts:
            index = parts["g_idx"]
            require_dtype(f"{stem}.g_idx", index, "I32", "I64")
            require_shape(f"{stem}.g_idx", index, (inputs,))
            low, high = int(index[...].min()), int(index[...].max())
            if low < 0 or high >= groups:
                wrong = low if low < 0 else high
                raise ModelError(f"{index.file}: {stem}.g_idx must be from 0 to {groups - 1}; got {wrong}")
        return out, inputs

    def rows(self, name: str, parts: Parts, rows: slice) -> np.ndarray:
        integers = unpack(parts["qweight"][:, rows], self.bits, axis=0)
        zeros = unpack_range(parts["qzeros"][...], self.bits, 1, rows)
        zeros = (zeros + self.offset) & ((1 << self.bits) - 1)
        inputs = len(integers)
        if "g_idx" in parts:
            group = parts["g_idx"][...]
        else:
            group = np.arange(inputs) // (inputs if self.group_size == -1 else self.group_size)
        scales = as_float32(parts["scales"], (slice(None), rows))
        return ((integers - zeros[group]) * scales[group]).T
