"""What a process keeps of the memory that it has freed, and a cache that takes memory as it fills."""

import ctypes
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from entropic_jax.serving.engine import allocator
from entropic_jax.state.cache import allocate
from tests import tiny

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROGRAM = """
import ctypes, sys, threading
from entropic_jax.serving.engine import allocator

library = ctypes.CDLL(None)
library.fopen.restype = library.malloc.restype = ctypes.c_void_p
library.malloc_info.argtypes, library.fclose.argtypes = (ctypes.c_int, ctypes.c_void_p), (ctypes.c_void_p,)
if sys.argv[2] == "limited":
    allocator.limit_arenas()
barrier = threading.Barrier(8)
def work():
    barrier.wait()
    library.malloc(100_000)
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
file = library.fopen(sys.argv[1].encode(), b"w")
library.malloc_info(0, file)
library.fclose(file)
"""


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@LINUX
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another C library than glibc")
def test_threads_share_arenas(tmp_path):
    arenas = {}
    for name in ("limited", "as it is"):
        report = tmp_path / name
        subprocess.run([sys.executable, "-c", PROGRAM, str(report), name], check=True)
        arenas[name] = report.read_text().count("<heap nr=")
    assert arenas["limited"] <= allocator.ARENAS < arenas["as it is"]


@LINUX
def test_a_cache_takes_memory_as_it_fills():
    # The kernel and the program exist before anything is measured.
    jax.block_until_ready(allocate(tiny.model().decoder.shape, 4, 2**14))
    before = resident()
    cache = allocate(tiny.model().decoder.shape, 64, 2**15)
    jax.block_until_ready(cache)
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert size > 2**28 and resident() - before < size / 4
    filled = [jnp.ones_like(layer.keys) for layer in cache.layers]
    jax.block_until_ready(filled)
    assert resident() - before > size / 4
