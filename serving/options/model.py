"""Defaults of the model options: the embedded model, and the dtype that a model computes in."""

from pathlib import Path

from ..request import RequestError

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "embedded"
"""The model that ships with the package."""
QUANTIZATIONS = ("int8", "int4", "int4-128", "fp8")
"""The values of `--quantization`: those of `models.quantisation`, which takes long to import."""


def check_directory(model: Path) -> None:
    """Raise RequestError unless the path of a model is a directory."""
    if not model.is_dir():
        raise RequestError(
            f"model must be a directory with config.json and safetensors files; got {model}", "model"
        )


def default_dtype() -> str:
    """The default dtype of a model's computations: float32 on a CPU, bfloat16 elsewhere."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
