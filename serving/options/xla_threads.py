"""Threads of XLA's CPU back end: one, for a model whose heavy work the CPU kernels do.

XLA hands the many small operations of a step to a pool of threads, which wait for more with the processor
busy and so take it from the threads of the kernels. XLA reads the number of its threads from the environment
variable NPROC when JAX first uses the CPU.
"""

import importlib.metadata
import logging
import os
from importlib.util import find_spec
from pathlib import Path

from entropic_jax.models.block_spec import AttentionSpec

from .model import converted_dtype

VARIABLE = "NPROC"
PLATFORMS = "JAX_PLATFORMS"

_log = logging.getLogger(__name__)


def limit_xla_threads(
    model: Path, dtype: str | None, method: str | None = None, divided: bool = False
) -> None:
    """Let XLA's CPU back end have one thread if kernels do a model's heavy work; JAX must not be in use yet.

    A number that the environment states is kept.

    Args:
        model: the model directory.
        dtype: the dtype that the model computes in; None or "auto" for the default of the device.
        method: the method by which prompts are prefilled; those that leave positions out do so in plain JAX.
        divided: whether several devices or processes compute.
    """
    if VARIABLE in os.environ or divided or accelerators():
        return
    if dtype in (None, "auto"):
        dtype = converted_dtype(model)
    if dtype not in (None, "float32") or method not in (None, "dense"):
        return
    from entropic_jax import cpu_runtime
    from entropic_jax.models.decoder import blocks
    from entropic_jax.models.model import read_config

    if not cpu_runtime.numba_installed() or cpu_runtime.num_processors() > cpu_runtime.MAX_THREADS:
        return
    try:
        layers = blocks(read_config(model))
    except (OSError, ValueError):  # whoever loads the model says what is wrong
        return
    if all(has_cpu_kernel(layer.attention) for layer in layers):
        os.environ[VARIABLE] = "1"
        _log.info("XLA uses one thread, CPU kernels the others; set %s=N for N threads of XLA", VARIABLE)


def has_cpu_kernel(attention: object) -> bool:
    """Whether CPU kernels compute the attention of a layer in prefill and decoding."""
    return (
        isinstance(attention, AttentionSpec)
        and attention.head_dim % 16 == 0
        and attention.soft_cap is None
        and not attention.sinks
    )


def accelerators() -> bool:
    """Whether JAX may compute on another device than the CPU here."""
    if platforms := os.environ.get(PLATFORMS):
        return platforms != "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return bool(plugins) or find_spec("jax_plugins") is not None or find_spec("libtpu") is not None
