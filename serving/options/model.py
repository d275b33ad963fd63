"""Defaults of the model options: the embedded model, and the dtype that a model computes in."""

from pathlib import Path

from entropic_jax.parameter_tables.table import short

from ..request import RequestError

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "embedded"
"""The model that ships with the package."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""The values of `--dtype`."""
QUANTIZATIONS = ("int8", "int4", "int4-128", "fp8")
"""The values of `--quantization`: those of `models.quantisation`, which takes long to import."""


def check_directory(model: Path) -> None:
    """Raise RequestError unless the path of a model is a directory."""
    if not model.is_dir():
        raise RequestError(
            f"model must be a directory with config.json and safetensors files; got {short(str(model))}",
            "model",
        )


def computing_dtype(dtype: str | None) -> str:
    """The dtype that a model computes in.

    Args:
        dtype: one of `DTYPES`; None or "auto" for float32 on a CPU and bfloat16 elsewhere.

    Raises:
        RequestError: it is another.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}", "dtype")
    if dtype is not None and dtype != "auto":
        return dtype
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
