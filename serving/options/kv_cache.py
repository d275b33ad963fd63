"""Data types of the KV cache, by vLLM's names."""

import argparse
from typing import Any, Literal, get_args

from entropic_jax.parameter_tables.table import ParameterError

FLOAT8 = "float8_e4m3fn"
# Whatever of 8 bits is named has a scale for each token and KV head.
KvCacheDtype = Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head"]


def add_argument(parser: argparse._ActionsContainer) -> None:
    """Declare `--kv-cache-dtype`."""
    parser.add_argument(
        "--kv-cache-dtype",
        choices=get_args(KvCacheDtype),
        default="auto",
        help="data type of keys and values; those of 8 bits have a scale per token and KV head (default: as "
        "--dtype)",
    )


def pages_of(kv_cache_dtype: KvCacheDtype, params: Any) -> Any:
    """The dtype of the pages of a model with these params, on the default device. Raises as `check_pages`."""
    import jax

    stored = stored_as(kv_cache_dtype, jax.tree.leaves(params)[0].dtype)
    check_pages(stored, jax.default_backend())
    return stored


def stored_as(kv_cache_dtype: KvCacheDtype, dtype: Any) -> Any:
    """The dtype of the pages of a model that computes in `dtype`."""
    if kv_cache_dtype == "auto":
        return dtype
    if kv_cache_dtype == "bfloat16":
        return "bfloat16"
    return "int8" if kv_cache_dtype.startswith("int8") else FLOAT8


def check_pages(dtype: Any, platform: str) -> None:
    """Raise ParameterError where pages of a dtype would be copied at every step."""
    if dtype == FLOAT8 and platform == "cpu":
        raise ParameterError(
            "kv_cache_dtype must be auto, bfloat16 or int8_per_token_head on a CPU, where every step would "
            "widen an fp8 cache; got fp8",
            "kv_cache_dtype",
        )
