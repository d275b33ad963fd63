"""Threads of XLA's CPU back end: one where kernels do the heavy work, as many as it likes elsewhere."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from entropic_jax import cpu_runtime, models
from entropic_jax.serving import cli
from entropic_jax.serving.options import xla_threads
from entropic_jax.serving.options.model import EMBEDDED

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)

pytestmark = pytest.mark.skipif(not cpu_runtime.numba_installed(), reason="no kernels for this CPU")


@pytest.fixture
def limited(monkeypatch):
    """`limit_xla_threads` on a machine of two processors without accelerators: what NPROC is afterwards."""
    monkeypatch.delenv(xla_threads.VARIABLE, raising=False)
    monkeypatch.setenv(xla_threads.PLATFORMS, "cpu")
    monkeypatch.setattr(cpu_runtime, "num_processors", lambda: 2)

    def limited(*arguments, **options) -> str | None:
        monkeypatch.delenv(xla_threads.VARIABLE, raising=False)
        xla_threads.limit_xla_threads(*arguments, **options)
        stated = os.environ.get(xla_threads.VARIABLE)
        monkeypatch.delenv(xla_threads.VARIABLE, raising=False)
        return stated

    return limited


def directory(folder, architecture: str, **changes):
    """A directory that has the configuration of a model and nothing else."""
    model = models.initialise(models.Config(architecture=architecture, **SIZES, **changes), 0)
    models.save(model, folder)
    return folder


def test_a_model_that_kernels_compute_leaves_xla_one_thread(limited):
    assert limited(EMBEDDED, None) == limited(EMBEDDED, "auto", "dense") == "1"


@pytest.mark.parametrize(
    "options",
    [("bfloat16",), ("float32", "entropy-prefill"), ("float32", "dense", True)],
    ids=["dtype", "method", "divided"],
)
def test_plain_jax_keeps_its_threads(limited, options):
    assert limited(EMBEDDED, *options) is None


def test_more_processors_than_kernels_use(limited, monkeypatch):
    monkeypatch.setattr(cpu_runtime, "num_processors", lambda: cpu_runtime.MAX_THREADS + 1)
    assert limited(EMBEDDED, None) is None


def test_accelerators_and_stated_numbers(limited, monkeypatch):
    monkeypatch.setenv(xla_threads.PLATFORMS, "cuda,cpu")
    assert limited(EMBEDDED, None) is None
    monkeypatch.setenv(xla_threads.PLATFORMS, "cpu")
    monkeypatch.setenv(xla_threads.VARIABLE, "3")
    xla_threads.limit_xla_threads(EMBEDDED, None)
    assert os.environ[xla_threads.VARIABLE] == "3"


def test_mixtures_and_missing_models(limited, tmp_path):
    mixture = dict(num_local_experts=4, num_experts_per_tok=2)
    assert limited(directory(tmp_path / "experts", "MixtralForCausalLM", **mixture), None) == "1"
    assert limited(tmp_path / "none", None) is None


def test_attention_with_a_soft_cap_is_not_native():
    (spec, *_) = models.decoder.blocks(models.Config(architecture="LlamaForCausalLM", **SIZES))
    assert xla_threads.has_cpu_kernel(spec.attention)
    assert not xla_threads.has_cpu_kernel(dataclasses.replace(spec.attention, soft_cap=30.0))
    assert not xla_threads.has_cpu_kernel(dataclasses.replace(spec.attention, sinks=True))


@pytest.mark.slow
def test_the_command_line_reads_the_variable_before_jax_does():
    """A process in which XLA has one thread has fewer threads than one in which it has sixteen."""
    script = (
        "import contextlib, io, json, os, threading\n"
        "from entropic_jax.serving.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    main('generate --preset off --prompt a --max-tokens 2 --seed 0'.split())\n"
        "print(json.dumps([os.environ['NPROC'], len(os.listdir('/proc/self/task'))]))\n"
    )

    def run(**environment):
        inherited = {name: value for name, value in os.environ.items() if name != xla_threads.VARIABLE}
        command = [sys.executable, "-c", script]
        output = subprocess.run(
            command, env=inherited | environment, capture_output=True, text=True, timeout=300, check=True
        )
        return json.loads(output.stdout)

    if not os.path.isdir("/proc/self/task") or cpu_runtime.num_processors() > cpu_runtime.MAX_THREADS:
        pytest.skip("threads are not listed here, or kernels do not use all processors")
    number, threads = run(JAX_PLATFORMS="cpu")
    assert number == "1" and threads + 10 <= run(JAX_PLATFORMS="cpu", NPROC="16")[1]


def test_a_server_leaves_xla_one_thread(limited):
    """With the options of `entropic serve` alone."""
    options = cli.parsed(["serve"])
    assert limited(options.model, options.dtype, options.method) == "1"
