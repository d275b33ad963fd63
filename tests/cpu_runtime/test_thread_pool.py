"""The thread pool under load: every chunk runs once, and the caller waits for the helpers.

It runs in a process of its own, because a pool that does not wait corrupts the heap or never returns.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from entropic_jax import cpu_runtime

ROOT = Path(__file__).resolve().parents[2]
CHUNKS, HELPED_CALLS = 6, 8  # chunks of a job; jobs in which a helper must have run a chunk
# Each chunk counts its runs, names the thread that ran it, and computes what takes a while; chunk 0, which is
# taken last, takes longest. The buffer is freed before the next job, as the kernels do.
SCRIPT = """
import ctypes, os, sys, threading, time
os.sched_getaffinity = lambda process: range(3)
import numpy as np
from numba import cfunc, njit, types
from entropic_jax.cpu_runtime import threads
threads.start()
from entropic_jax.cpu_runtime.kernel import allocate, free, parallel_for, words
from entropic_jax.cpu_runtime.thread_pool import _fetch_add

chunks, helped_jobs, rounds = int(sys.argv[1]), int(sys.argv[2]), 1_000_000
this_thread = ctypes.CDLL(None).pthread_self
this_thread.argtypes, this_thread.restype = [], ctypes.c_size_t

@njit
def compute(seed, chunk):
    x = seed + chunk
    for _ in range(rounds * (1 + 4 * (chunk == 0))):
        x = x * 6364136223846793005 + 1442695040888963407
    return x

@cfunc(types.void(types.intp, types.intp))
def task(argument, chunk):
    job = words(argument, 1 + 3 * chunks)
    _fetch_add(argument + 8 * (1 + 3 * chunk), 1)
    job[2 + 3 * chunk] = this_thread()
    job[3 + 3 * chunk] = compute(job[0], chunk)

task_address = task.address

@cfunc(types.void(types.intp, types.intp))
def run(seed, out):
    job_data = allocate(8 * (1 + 3 * chunks))
    job = words(job_data, 1 + 3 * chunks)
    job[:] = 0
    job[0] = seed
    parallel_for(task_address, job_data, chunks)
    words(out, 1 + 3 * chunks)[:] = job
    free(job_data)

call = ctypes.CFUNCTYPE(None, ctypes.c_ssize_t, ctypes.c_ssize_t)(run.address)
def stress(first_seed):
    seed, helped, deadline = first_seed, 0, time.monotonic() + 60
    while helped < helped_jobs and time.monotonic() < deadline:
        out = np.full(1 + 3 * chunks, -1)
        call(seed, out.ctypes.data)
        runs, thread, result = out[1:].reshape(chunks, 3).T
        assert (runs == 1).all(), f"runs of each chunk: {runs}"
        assert result.tolist() == [compute(seed, c) for c in range(chunks)], "results"
        helped += (thread != threading.get_ident()).any()
        seed += 1
    return helped

# A pool that is never released, or whose threads end, would leave all jobs but the first to the caller.
assert (helped := stress(0)) == helped_jobs, f"helpers took part in {helped} jobs"
failures = []
def stress_together(first_seed):
    try:
        stress(first_seed)
    except AssertionError as error:
        failures.append(error)
callers = [threading.Thread(target=stress_together, args=(seed,)) for seed in (10**6, 10**9)]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
assert not failures, failures
"""

pytestmark = pytest.mark.skipif(not cpu_runtime.numba_installed(), reason="Numba is not installed")


@pytest.mark.slow
def test_every_chunk_runs_once_and_the_caller_waits_for_it():
    environment = {k: v for k, v in os.environ.items() if k != "ENTROPIC_KERNELS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(CHUNKS), str(HELPED_CALLS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
