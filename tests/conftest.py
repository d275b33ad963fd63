"""Settings for all tests: strict type promotion, one device, a compilation cache kept between runs."""

import gc
import logging
import os
import sys
from pathlib import Path

from tests.compilation import QUICK

MOST_MAPPINGS = 12_000  # of memory, when a file of tests ends
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "xla"

# Before JAX is imported, and for processes that tests start. Nearly all of a run is XLA compiling small
# programs that run once. Without its costlier passes that takes half the time. With `XLA_FLAGS=` in the
# environment the tests run as users' programs do.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", QUICK)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("ENTROPIC_KERNEL_CACHE", str(CACHE.with_name("kernels")))
os.environ.setdefault("ENTROPIC_COST_CACHE", "")  # tests measure nothing that a later test would see
os.environ.setdefault("ENTROPIC_PROGRAM_CACHE", "")  # a test may replace a function that programs call
# Warpgroups that the GPU's interpreter runs wait for each other in threads of XLA's pool: one must be left.
os.environ.setdefault("NPROC", str(max(4, os.cpu_count() or 1)))

# Where Python is told to write no bytecode, as in containers, it would compile every library in each of the
# hundred processes that tests start. The bytecode then goes to the folder of the caches.
if sys.dont_write_bytecode and sys.pycache_prefix is None:
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(CACHE.with_name("bytecode"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
gc.set_threshold(50_000, 10, 10)  # tracing makes many objects that live on, which each collection would visit

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests marked `slow`, `exhaustive` or `mutation` unless `-m` names the mark.

    A test that is named with `::` runs, slow or not. Where `-m` names `exhaustive` or `mutation`, slow tests
    with that mark run, too. The files of the server come first: they take longest, and a process of
    pytest-xdist that begins one last would work alone.
    """
    named = any("::" in argument for argument in config.args)
    further = ("exhaustive", "mutation")
    slow = () if named or any(mark in config.option.markexpr for mark in further) else ("slow",)
    for mark in (*further, *slow):
        if mark not in config.option.markexpr:
            left_out = [item for item in items if item.get_closest_marker(mark)]
            items[:] = [item for item in items if not item.get_closest_marker(mark)]
            config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: "serving" not in item.path.parts)


class Unstored(logging.Handler):
    """Fails a test in which a kernel is compiled whose machine code cannot be stored."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise what a warning about machine code says."""
        if "machine code refers to" in record.msg:
            raise AssertionError(record.getMessage())


@pytest.fixture(autouse=True, scope="session")
def machine_code_is_stored():
    """Every kernel that the tests compile, another start must load."""
    logger, handler = logging.getLogger("entropic_jax.kernels"), Unstored(logging.WARNING)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Clear compiled programs before there are too many.

    On a CPU each keeps several memory mappings, and Linux allows a process about 65,000: the next mapping
    ends the process.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def standard_promotion(request: pytest.FixtureRequest):
    """Relax type promotion where a test is marked `standard_promotion`, for libraries that rely on it."""
    if request.node.get_closest_marker("standard_promotion") is None:
        yield
    else:
        with jax.numpy_dtype_promotion("standard"):
            yield
