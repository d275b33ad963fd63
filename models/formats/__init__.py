"""Formats of weights on disk: the tensors of a quantised matrix, and the dense matrix that they describe.

`quantization_config.quant_method` of config.json chooses the format. Each format is a class in its own file.
"""

import logging
from collections.abc import Mapping
from typing import Any

from ..config import ModelError, abbreviate
from .awq import AWQ
from .bitsandbytes import Bitsandbytes
from .compressed_tensors import CompressedTensors
from .fp8 import FP8
from .gptq import GPTQ
from .modelopt import ModelOpt
from .mxfp4 import MXFP4
from .settings import Settings
from .weight_format import WeightFormat

FIELDS = ("quantization_config", "compression_config")  # of config.json; the second is an older name
LOG = logging.getLogger("entropic_jax.models")
FORMATS: dict[str, type[WeightFormat]] = {
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "modelopt": ModelOpt,
    "compressed-tensors": CompressedTensors,
    "gptq": GPTQ,
    "awq": AWQ,
    "mxfp4": MXFP4,
    "bitsandbytes": Bitsandbytes,
}


def weight_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """The format of the weights that a parsed config.json describes; None for weights as they are.

    Raises ModelError for a format that is not read.
    """
    inner = raw.get("text_config")  # of the text tower of a model that sees images
    parts = (raw, inner) if isinstance(inner, Mapping) else (raw,)
    fields = [(name, part[name]) for part in parts for name in FIELDS if part.get(name)]
    if not fields:
        return None
    field, value = fields[0]
    settings = Settings(value, field)
    method = settings.fields.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise ModelError(
            f"{field}.quant_method must be one of {', '.join(map(repr, FORMATS))}; got {abbreviate(method)}"
        )
    return FORMATS[method](settings)


def log_activations(weights: WeightFormat, name: str, dtype: str) -> None:
    """Say that activations which other programs quantise keep their dtype.

    Args:
        weights: the format of the weights.
        name: the name of the model, for the message.
        dtype: the dtype of the activations.
    """
    if weights.activation_bits is not None:
        LOG.warning(
            "%s: activations stay %s; its configuration asks for %d bits",
            name,
            dtype,
            weights.activation_bits,
        )
