"""Flags of XLA with which tests compile quickly. Importing this module imports no part of JAX."""

from importlib import metadata

VERSION = tuple(int(part) for part in metadata.version("jaxlib").split(".")[:2])
# XLA ends a process that gives it a flag that it does not know.
FUSION = "--xla_cpu_use_fusion_emitters=false " if VERSION < (0, 11) else ""
QUICK = f"--xla_backend_optimization_level=0 {FUSION}--xla_cpu_parallel_codegen_split_count=1"


def virtual_devices(number: int) -> str:
    """The flags for a process of tests with several virtual devices."""
    return f"--xla_force_host_platform_device_count={number} {QUICK}"
