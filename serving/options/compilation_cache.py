"""Persistent compilation cache, so that the second start of a command does not compile again."""

import hashlib
import os
from pathlib import Path

from entropic_jax.mesh.devices import processor, user_cache


def remember_compilations() -> None:
    """Let JAX keep compiled programs on disk, unless JAX_COMPILATION_CACHE_DIR already says where."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        import jax

        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def cache_folder() -> Path:
    """A folder below XDG_CACHE_HOME (`~/.cache`), of its own for every kind of processor.

    Programs for the CPU use the instructions of the one they were compiled on, and a home folder may be
    shared between machines.
    """
    return user_cache() / f"xla-{hashlib.sha256(processor().encode()).hexdigest()[:12]}"
