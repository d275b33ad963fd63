"""Defaults of the model options: the embedded model, and the dtype that a model computes in."""

from pathlib import Path

from entropic_jax.parameter_tables.json_file import json_object
from entropic_jax.parameter_tables.table import short

from ..request import RequestError

EMBEDDED = Path(__file__).resolve().parents[2] / "models" / "embedded"
"""The model that ships with the package."""
CONVERTED = "converted.json"  # of a converted checkpoint, see `models.converted`
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


def converted_dtype(model: str | Path | None) -> str | None:
    """The dtype that a converted checkpoint says it has; None for any other directory."""
    dtype = None if model is None else json_object(Path(model) / CONVERTED).get("dtype")
    return dtype if dtype in DTYPES[1:] else None


def computing_dtype(dtype: str | None, model: str | Path | None = None) -> str:
    """The dtype that a model computes in.

    Args:
        dtype: one of `DTYPES`; None or "auto" for that of a converted checkpoint, else float32 on a CPU and
            bfloat16 elsewhere.
        model: the model directory.

    Raises:
        RequestError: it is another.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}", "dtype")
    if dtype is not None and dtype != "auto":
        return dtype
    if (stored := converted_dtype(model)) is not None:
        return stored
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
