"""Matrix units: whether this process may use x86 instructions for products of bfloat16 and int8."""

import ctypes
import platform
import sys
from functools import cache

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # Linux: a system call and its arguments


@cache
def matrix_units_missing() -> str | None:
    """The reason why kernels cannot multiply tiles of bfloat16; None if they can.

    Linux grants the registers to a process that asks for them, and to all of its threads.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "AMX is used on x86-64 under Linux only"
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f")):
        return "the processor has no AMX"
    if ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) != 0:
        return "Linux does not permit AMX"
    return None


@cache
def pairs_missing() -> str | None:
    """The reason why kernels cannot multiply pairs of bfloat16 in vectors (AVX512-BF16); None if they can."""
    if platform.machine() in ("x86_64", "AMD64"):
        import llvmlite.binding as llvm

        if llvm.get_host_cpu_features().get("avx512bf16"):
            return None
    return "the processor has no AVX512-BF16"


@cache
def quads_missing() -> str | None:
    """The reason why kernels cannot multiply quads of int8 in vectors (AVX512-VNNI); None if they can."""
    if platform.machine() in ("x86_64", "AMD64"):
        import llvmlite.binding as llvm

        if llvm.get_host_cpu_features().get("avx512vnni"):
            return None
    return "the processor has no AVX512-VNNI"


def rounded_products_missing() -> str | None:
    """The reason why kernels cannot multiply operands of bfloat16 as they are; None if they can."""
    units, pairs = matrix_units_missing(), pairs_missing()
    return f"{units}, {pairs}" if units and pairs else None
