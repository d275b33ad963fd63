"""FP8 of NVIDIA's Model Optimizer: matrices of 8-bit floats with one scale each.

    w[i, j] = q[i, j] · s

Activations keep their dtype, and scales of a quantised KV cache are not read.
"""

from .fp8 import FP8
from .settings import Settings


class ModelOpt(FP8):
    """Weights of quant_method "modelopt".

    Args:
        settings: `quantization_config`.
    """

    def __init__(self, settings: Settings) -> None:
        settings.choice("quant_algo", ("FP8",))
        super().__init__(settings)
