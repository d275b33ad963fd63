"""Paged attention on a CPU, compiled by Numba and called by XLA as a custom call.

XLA's CPU backend runs a loop over pages on one core and copies what it gathers;
here every tile is read once, where it lies, by every core. A row's pages are dealt to `SPLITS` workers in
contiguous shares whose partial softmaxes are merged at the end; the shares depend on the row alone, so
neither its neighbours nor the number of cores changes a bit of its result.
"""

import ctypes
import os
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

try:
    import numba
except ImportError:  # an unsupported platform or Python: the reference serves
    numba = None

SPLITS = min(8, os.cpu_count() or 1)
SERIAL = 1 << 18  # elements of K: below, starting threads costs more than it saves


def decode(q, keys, values, table, first, last):
    """See the package; float32 on a CPU under Linux or macOS."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError("the default device is not a CPU")
    if numba is None or sys.platform not in ("linux", "darwin"):
        raise NotImplementedError("Numba is not installed or the platform has no POSIX threads")
    if {q.dtype, keys.dtype, values.dtype} != {jnp.dtype("float32")}:
        raise NotImplementedError(f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}: float32 is served")
    name = _register(*q.shape[1:], keys.shape[2])
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(q.shape, q.dtype), vmap_method="sequential")
    return call(q, keys, values, table, first, last)


@cache
def _register(kv_heads: int, group: int, head_dim: int, page_size: int) -> str:
    """Compile the kernel for one shape and make it known to XLA; returns its name there."""
    name = f"entropic_paged_decode_{kv_heads}_{group}_{head_dim}_{page_size}"
    function = _build(kv_heads, group, head_dim, page_size)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(name, capsule(function.address, None, None), platform="cpu")
    _alive.append(function)
    return name


_alive: list = []  # compiled code must outlive every executable that calls it


def _build(kv_heads: int, group: int, head_dim: int, page_size: int):
    from numba import carray, cfunc, njit, types
    from numba.extending import intrinsic

    splits, serial = SPLITS, SERIAL
    low, lowest, log2_e, one = (np.float32(x) for x in (-1e30, -126, 1.4426950408889634, 1))
    # Minimax coefficients of 2ᶠ on [0, 1): relative error 8e-8.
    c1, c2, c3, c4, c5 = (np.float32(x) for x in (0.69315131, 0.24016445, 0.05579991, 0.00901703, 0.00186713))

    @intrinsic
    def pointer(context, address):
        """An integer as a pointer."""

        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

        return types.voidptr(types.intp), generate

    @njit(fastmath={"reassoc", "contract", "nsz", "arcp"}, nogil=True, boundscheck=False, error_model="numpy")
    def share(q, keys, values, table, first, last, split, out, top, total):
        """The partial softmax over one share of the pages of every row."""
        score = np.empty((group, page_size), np.float32)
        power = np.empty(page_size, np.int32)  # 2ⁿ, by its bits
        scale_of = power.view(np.float32)
        for row in range(q.shape[0]):
            for head in range(kv_heads):
                for g in range(group):
                    top[row, head, g] = low
                    total[row, head, g] = np.float32(0)
                    for d in range(head_dim):
                        out[row, head, g, d] = np.float32(0)
            if last[row] <= first[row]:
                continue
            lead = first[row] // page_size
            count = (last[row] + page_size - 1) // page_size - lead
            begin = lead + count * split // splits
            end = lead + count * (split + 1) // splits
            for index in range(begin, end):
                page = np.uint32(table[row, index])
                low_slot = max(first[row] - index * page_size, 0)
                high_slot = min(last[row] - index * page_size, page_size)
                for head in range(kv_heads):
                    key, value = keys[page, head], values[page, head]
                    for g in range(group):
                        query = q[row, head, g]
                        for t in range(low_slot, high_slot):
                            a = np.float32(0)
                            for d in range(head_dim):
                                a += key[t, d] * query[d]
                            score[g, t] = a
                    for g in range(group):
                        weight = score[g]
                        peak = top[row, head, g]
                        for t in range(low_slot, high_slot):
                            peak = max(peak, weight[t])
                        shrink = np.exp(top[row, head, g] - peak)
                        mass = total[row, head, g] * shrink
                        # eˣ = 2ⁿ · 2ᶠ with a polynomial for 2ᶠ: a call of exp would not vectorise.
                        for t in range(low_slot, high_slot):
                            x = max((weight[t] - peak) * log2_e, lowest)
                            n = np.floor(x)
                            f = x - n
                            power[t] = (np.int32(n) + np.int32(127)) << np.int32(23)
                            weight[t] = ((((c5 * f + c4) * f + c3) * f + c2) * f + c1) * f + one
                        for t in range(low_slot, high_slot):
                            weight[t] *= scale_of[t]
                            mass += weight[t]
                        top[row, head, g] = peak
                        total[row, head, g] = mass
                        part = out[row, head, g]
                        for d in range(head_dim):
                            part[d] *= shrink
                        for t in range(low_slot, high_slot):
                            w = weight[t]
                            for d in range(head_dim):
                                part[d] += w * value[t, d]

    @njit(nogil=True)
    def buffer(frame, place):
        """Address of the data, and of the dimensions, of one operand (`XLA_FFI_Buffer`)."""
        operands = carray(pointer(frame[9]), (6,), np.intp)
        words = carray(pointer(operands[place]), (6,), np.intp)
        return words[3], carray(pointer(words[5]), (words[4],), np.int64)

    @njit(nogil=True)
    def run(job):
        """One share, from a job `[call frame, out, top, total, split]` of addresses."""
        frame = carray(pointer(job[0]), (15,), np.intp)
        q, shape = buffer(frame, 0)
        keys, tiles = buffer(frame, 1)
        values, _ = buffer(frame, 2)
        table, grid = buffer(frame, 3)
        first, _ = buffer(frame, 4)
        last, _ = buffer(frame, 5)
        rows = shape[0]
        pool = (tiles[0], kv_heads, page_size, head_dim)
        share(
            carray(pointer(q), (rows, kv_heads, group, head_dim), np.float32),
            carray(pointer(keys), pool, np.float32),
            carray(pointer(values), pool, np.float32),
            carray(pointer(table), (rows, grid[1]), np.int32),
            carray(pointer(first), (rows,), np.int32),
            carray(pointer(last), (rows,), np.int32),
            job[4],
            carray(pointer(job[1]), (rows, kv_heads, group, head_dim), np.float32),
            carray(pointer(job[2]), (rows, kv_heads, group), np.float32),
            carray(pointer(job[3]), (rows, kv_heads, group), np.float32),
        )

    @cfunc(types.voidptr(types.voidptr))
    def worker(argument):
        run(carray(argument, (5,), np.intp))
        return argument

    library = ctypes.CDLL(None)
    create, join = library.pthread_create, library.pthread_join
    create.argtypes, create.restype = [ctypes.c_size_t] * 4, ctypes.c_int
    join.argtypes, join.restype = [ctypes.c_size_t] * 2, ctypes.c_int
    entry = worker.address
    _alive.append(worker)

    @njit(nogil=True)
    def decode_rows(frame_address):
        frame = carray(pointer(frame_address), (15,), np.intp)
        first_address, shape = buffer(frame, 4)
        last_address, _ = buffer(frame, 5)
        rows = shape[0]
        first = carray(pointer(first_address), (rows,), np.int32)
        last = carray(pointer(last_address), (rows,), np.int32)
        out = np.empty((splits, rows, kv_heads, group, head_dim), np.float32)
        top = np.empty((splits, rows, kv_heads, group), np.float32)
        total = np.empty((splits, rows, kv_heads, group), np.float32)
        jobs = np.empty((splits, 5), np.intp)
        threads = np.zeros(splits, np.uintp)
        work = 0
        for row in range(rows):
            work += max(last[row] - first[row], 0) * kv_heads * head_dim
        for s in range(splits):
            jobs[s, 0] = frame_address
            jobs[s, 1] = out[s].ctypes.data
            jobs[s, 2] = top[s].ctypes.data
            jobs[s, 3] = total[s].ctypes.data
            jobs[s, 4] = s
        for s in range(1, splits):
            failed = 1
            if work >= serial:
                failed = create(threads[s:].ctypes.data, 0, entry, jobs[s].ctypes.data)
            if failed != 0:
                threads[s] = 0
                run(jobs[s])
        run(jobs[0])
        for s in range(1, splits):
            if threads[s] != 0:
                join(threads[s], 0)
        results = carray(pointer(frame[14]), (1,), np.intp)
        result = carray(pointer(results[0]), (6,), np.intp)
        final = carray(pointer(result[3]), (rows, kv_heads, group, head_dim), np.float32)
        for row in range(rows):
            for head in range(kv_heads):
                for g in range(group):
                    peak = low
                    for s in range(splits):
                        peak = max(peak, top[s, row, head, g])
                    mass = np.float32(0)
                    for s in range(splits):
                        mass += total[s, row, head, g] * np.exp(top[s, row, head, g] - peak)
                    for d in range(head_dim):
                        final[row, head, g, d] = np.float32(0)
                    if mass != 0:  # NaN passes: it must end the sequence, not look like silence
                        for s in range(splits):
                            scale = np.exp(top[s, row, head, g] - peak) / mass
                            for d in range(head_dim):
                                final[row, head, g, d] += out[s, row, head, g, d] * scale

    @intrinsic
    def address(context, value):
        """A pointer as an integer."""

        def generate(context, builder, signature, arguments):
            return builder.ptrtoint(arguments[0], context.get_value_type(types.intp))

        return types.intp(types.voidptr), generate

    @njit(nogil=True)
    def metadata_version(frame):
        """Address of major and minor version in XLA's own table of functions (`XLA_FFI_Api`)."""
        return frame[2] + 4 * 8

    @cfunc(types.intp(types.voidptr))
    def entry_point(argument):
        """An XLA FFI handler: takes an `XLA_FFI_CallFrame`, returns the null error."""
        frame = carray(argument, (15,), np.intp)
        if frame[1] != 0:  # XLA asks for the handler's metadata: answer with the version of its interface
            extension = carray(pointer(frame[1]), (4,), np.intp)
            metadata = carray(pointer(extension[3]), (5,), np.intp)
            version = carray(pointer(metadata_version(frame)), (1,), np.intp)
            metadata[3] = version[0]
            return 0
        decode_rows(address(argument))
        return 0

    return entry_point
