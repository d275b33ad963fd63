"""The machine-code cache: a second process loads what the first one compiled, and nothing else."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entropic_jax import cpu_runtime

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import jax.numpy as jnp, numpy as np
from entropic_jax.pallas.entropy_moments.cpu import entropy_moments
from entropic_jax.pallas.paged_attention import cpu
rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
q, keys, values = draw(1, 1, 1, 16), draw(3, 1, 4, 16), draw(3, 1, 4, 16)
where = jnp.arange(2, dtype=jnp.int32)[None], None, None, jnp.zeros(1, jnp.int32), jnp.array([7], jnp.int32)
moments = entropy_moments(draw(2, 40), jnp.ones(2), jnp.ones(2, bool))
results = [cpu.decode(q, keys, values, *where).out, *moments]
print("numba" in sys.modules, b"".join(np.asarray(x).tobytes() for x in results).hex())
"""

pytestmark = pytest.mark.skipif(not cpu_runtime.numba_installed(), reason="Numba is not installed")


def run(folder: Path | str) -> tuple[bool, str]:
    """Whether a fresh process needed Numba, and the bits of its result."""
    environment = {"ENTROPIC_KERNEL_CACHE": str(folder), "JAX_PLATFORMS": "cpu"}
    environment = {k: v for k, v in os.environ.items() if k != "ENTROPIC_KERNELS"} | environment
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    compiled, bits = done.stdout.split()
    return compiled == "True", bits


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    compiled, bits = run(tmp_path)
    files = sorted(tmp_path.glob("kernels-*/*.kernel"))
    assert compiled and files
    assert run(tmp_path) == (False, bits)
    for file in files:  # damage: what cannot be trusted is compiled again
        file.write_bytes(file.read_bytes()[:-3] + b"???")
    assert run(tmp_path) == (True, bits)
    assert run(tmp_path) == (False, bits)


def test_functions_of_kernels_have_no_machine_code_of_their_own(monkeypatch):
    from numba import types

    from entropic_jax.cpu_runtime import code_cache
    from entropic_jax.cpu_runtime.numba_compiler import cfunc, njit

    monkeypatch.setenv(code_cache.VARIABLE, "")
    code_cache.cache_folder.cache_clear()

    @njit(nogil=True)
    def triple(x):
        return 3 * x

    @cfunc(types.intp(types.intp))
    def entry(x):
        return triple(x) + min(x, 2)

    assert entry.address == 0
    with pytest.raises(KeyError, match="Python cannot call a part of a kernel"):
        triple(5)
    try:
        address = code_cache.load_or_compile(
            "entropic_of_a_test", lambda: iter([("entropic_of_a_test", entry)])
        )
    finally:
        code_cache.cache_folder.cache_clear()
    assert ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t)(address)(5) == 17


@pytest.mark.exhaustive
def test_without_a_folder_nothing_is_kept(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert run("")[0] and run(file)[0]
    assert sorted(tmp_path.iterdir()) == [file]


def test_objects_come_back_as_they_were(tmp_path, monkeypatch):
    from entropic_jax.cpu_runtime import code_cache

    monkeypatch.setenv(code_cache.VARIABLE, str(tmp_path))
    code_cache.cache_folder.cache_clear()
    package = tmp_path / "package"
    try:
        objects = [("first", b"\n\x00abc"), ("second", b"")]
        assert code_cache._read_objects(package, "kernel") is None
        code_cache._write_objects(package, "kernel", objects)
        assert code_cache._read_objects(package, "kernel") == objects
        (file,) = tmp_path.glob("kernels-*/kernel.kernel")
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        assert code_cache._read_objects(package, "kernel") is None
        assert oct(file.stat().st_mode & 0o777) == "0o600"  # nobody else may put code there
    finally:
        code_cache.cache_folder.cache_clear()


def test_kernels_are_compiled_again_when_the_source_text_of_their_package_changes(tmp_path, monkeypatch):
    from entropic_jax.cpu_runtime import code_cache
    from entropic_jax.pallas.paged_attention import cpu

    monkeypatch.setenv(code_cache.VARIABLE, str(tmp_path / "cache"))
    packages = [tmp_path / "a", tmp_path / "b"]
    for package in packages:
        package.mkdir()
        (package / "cpu.py").write_text("X = 1")
        (package / "reference.py").write_text("Y = 1")

    def folders():
        code_cache.cache_folder.cache_clear()
        return [code_cache.cache_folder(package) for package in packages]

    try:
        before = folders()
        assert before[0] == before[1]  # names of folders do not matter, text does
        for name in ("cpu.py", "reference.py"):
            (packages[1] / name).write_text("Z = 2")
            after = folders()
            assert after[0] == before[0]
            assert after[1] not in before
            before = after
    finally:
        code_cache.cache_folder.cache_clear()
    # The package of a kernel is that of its builder.
    source = Path(cpu.__file__).resolve()
    (build,) = [x for x in cpu._register.__wrapped__.__code__.co_consts if hasattr(x, "co_filename")]
    assert Path(build.co_filename).resolve() == source
