"""Self-test of the kernels: a small case of every operation on this machine, against float64."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..mesh.devices import default_device
from . import (
    entropy_moments,
    grouped_matmul,
    gumbel_argmax,
    longest_match,
    paged_attention,
    rms_norm,
    silu_and_mul,
    skinny_matmul,
    topk_entropy,
)
from .dispatch import Operation
from .paged_attention import PageSummary, SelectionRules
from .paged_attention import cases as paged_cases
from .paged_attention.reference import estimate_pages
from .topk_entropy import cases as topk_cases

K = 40
QUERIES = 24  # of a row in the prefill
FLOAT32, BFLOAT16 = 5e-5, 2e-2  # the largest differences that rounding explains


class KernelCheck(NamedTuple):
    """An operation, arguments for it, and the error of a result."""

    operation: Operation
    arguments: tuple[Any, ...]
    static: tuple[int, ...]  # the places of the static arguments
    error: Callable[[Any], float]  # of a result; infinite for a difference that is not rounding
    tolerance: float


class CheckResult(NamedTuple):
    """The outcome of one check."""

    operation: str
    chosen: str | None  # the back end that computes the operation
    declined: dict[str, str]  # back end: reason
    compile_seconds: float | None = None
    error: float | None = None
    tolerance: float | None = None
    problem: str | None = None  # None: the result is right


def run() -> list[CheckResult]:
    """Check every operation on the default device, with the back end that ENTROPIC_KERNELS names."""
    return [run_check(check) for check in checks()]


def run_check(check: KernelCheck) -> CheckResult:
    """Compile and run one operation. Errors are reported as the problem, not raised."""
    operation, arguments = check.operation, check.arguments
    try:
        candidates = operation.candidates()
        reasons = operation.decline_reasons(*arguments)
    except Exception as error:  # any error: the other operations are still checked
        return CheckResult(operation.name, None, {}, problem=_message(error))
    declined = {name: reason for name, reason in reasons.items() if reason is not None}
    chosen = next((name for name in candidates if reasons[name] is None), None)
    if chosen is None:
        return CheckResult(operation.name, None, declined, problem="every back end declines")

    # A new function: JAX must not find the program of another back end that was traced before.
    def call(*operands: Any) -> Any:
        return operation.backends[chosen](*operands)

    try:
        begin = time.perf_counter()
        program = jax.jit(call, static_argnums=check.static).lower(*arguments).compile()
        seconds = time.perf_counter() - begin
        operands = [x for i, x in enumerate(arguments) if i not in check.static]
        error = check.error(jax.block_until_ready(program(*operands)))
    except Exception as failure:
        return CheckResult(operation.name, chosen, declined, problem=_message(failure))
    problem = None
    if not error <= check.tolerance:
        problem = f"differs by {error:.2g}; at most {check.tolerance:g} is accepted"
    return CheckResult(operation.name, chosen, declined, seconds, error, check.tolerance, problem)


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def checks() -> list[KernelCheck]:
    """A check of each operation, in the dtype and with the shapes that suit the default device."""
    dtype = "float32" if default_device().platform == "cpu" else "bfloat16"
    return [
        _decode(dtype),
        _prefill(dtype),
        _write(dtype),
        _select_pages(),
        _topk_entropy(dtype),
        _project(dtype),
        _skinny_matmul(dtype),
        _grouped_matmul(dtype),
        _rms_norm(dtype),
        _silu_and_mul(dtype),
        _longest_match(),
        _gumbel_argmax(),
        _entropy_moments(),
    ]


def difference(result: Any, expected: Any) -> float:
    """The largest relative difference between floats, absolute below 1.

    It is infinite where shapes, integers, or NaN and infinities differ.
    """
    largest = 0.0
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.shape != y.shape:
            return np.inf
        if not jnp.issubdtype(x.dtype, jnp.floating):
            if not np.array_equal(x, y):
                return np.inf
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(y)
        if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return np.inf
        relative = np.abs(x[finite] - y[finite]) / np.maximum(1.0, np.abs(y[finite]))
        if np.isnan(relative).any():
            return np.inf
        largest = max(largest, float(relative.max(initial=0.0)))
    return largest


def _differs_from(expected: Any) -> Callable[[Any], float]:
    """The error of a result whose leaves should be these."""
    return lambda result: difference(result, expected)


def _tolerance(dtype: str) -> float:
    return FLOAT32 if dtype == "float32" else BFLOAT16


def _decode(dtype: str) -> KernelCheck:
    case = paged_cases.Case(4, 2, 4, 128, 64, 6, kept=0.6, window=True, dtype=dtype)
    arguments = paged_cases.build(case)
    expected = paged_cases.exact(case, arguments)
    operands = jax.tree.map(jnp.asarray, tuple(arguments))
    return KernelCheck(paged_attention.DECODE, operands, (), _differs_from(expected), _tolerance(dtype))


def _prefill(dtype: str) -> KernelCheck:
    case = paged_cases.Case(2, 2, 4, 128, 64, 4, kept=0.6, dtype=dtype)
    arguments = paged_cases.build(case)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((*arguments.q.shape[:3], QUERIES, case.head_dim)) * case.head_dim**-0.5
    q = q.astype(arguments.q.dtype)
    end = arguments.context_length
    query_start = np.maximum(end - QUERIES, 0).astype(np.int32)
    window_start = np.zeros((case.rows, QUERIES), np.int32)
    expected = np.zeros(q.shape)
    for i in range(QUERIES):
        visible = np.minimum(query_start + i + 1, end)
        expected[:, :, :, i] = paged_cases.exact(
            case, arguments._replace(q=q[:, :, :, i], context_length=visible)
        )[0]
    operands = (q, *arguments[1:6], window_start, query_start, end)
    operands = jax.tree.map(jnp.asarray, operands)
    return KernelCheck(paged_attention.PREFILL, operands, (), _differs_from(expected), _tolerance(dtype))


def _write(dtype: str) -> KernelCheck:
    rng = np.random.default_rng(2)
    rows, pool, kv_heads, size, head_dim = 3, 6, 2, 64, 128
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    tiles = [normal(pool, kv_heads, size, head_dim).astype(jnp.dtype(dtype)) for _ in range(2)]
    summaries = [*(normal(pool, kv_heads, head_dim) for _ in range(3)), np.abs(normal(pool, kv_heads))]
    k, v = (normal(rows, kv_heads, head_dim).astype(jnp.dtype(dtype)) for _ in range(2))
    page, slot = np.array([3, 0, 1], np.int32), np.array([0, 17, size - 1], np.int32)
    arguments = jax.tree.map(jnp.array, (tuple(tiles), tuple(summaries), k, v, page, slot))
    for row, (p, s) in enumerate(zip(page, slot, strict=True)):
        tiles[0][p, :, s], tiles[1][p, :, s] = k[row], v[row]
        key, value = k[row].astype(np.float32), v[row].astype(np.float32)
        new = (key, key, key, np.sqrt(np.square(value).sum(-1)))
        folds = (np.minimum, np.maximum, np.add, np.maximum)
        for summary, fold, x in zip(summaries, folds, new, strict=True):
            summary[p] = x if s == 0 else fold(summary[p], x)

    # The last page is scratch space, whose content is undefined.
    def without_bin(pools):
        return [np.asarray(x)[:-1] for x in jax.tree.leaves(pools)]

    expected = without_bin((tiles, summaries))
    return KernelCheck(
        paged_attention.WRITE,
        arguments,
        (),
        lambda result: difference(without_bin(result), expected),
        FLOAT32,
    )


def _select_pages() -> KernelCheck:
    rng = np.random.default_rng(3)
    rows, kv_heads, group, head_dim, size, max_pages = 2, 2, 4, 128, 16, 24
    pool = rows * max_pages + 1
    keys = rng.standard_normal((pool, kv_heads, size, head_dim)).astype(np.float32)
    summary = PageSummary(keys.min(2), keys.max(2), keys.sum(2))
    q = rng.standard_normal((rows, kv_heads, group, head_dim)).astype(np.float32) / 3
    information = rng.uniform(0.5, 2, (pool, kv_heads)).astype(np.float32)
    page_table = rng.permutation(pool - 1).reshape(rows, max_pages).astype(np.int32)
    context_length = np.array([max_pages * size, max_pages * size - 37], np.int32)
    dropped_mass_limit = np.array([0.3, 0.0], np.float32)
    rules = SelectionRules()
    arguments = jax.tree.map(
        jnp.asarray, (q, summary, information, page_table, context_length, dropped_mass_limit)
    )
    estimated = estimate_pages(q, summary, information, page_table, context_length, size, rules)
    mass, weight = np.asarray(estimated.mass), np.asarray(estimated.weight)

    def error(result: Any) -> float:
        largest = 0.0
        for row, head in np.ndindex(rows, kv_heads):
            kept = np.asarray(result.page_list)[row, head, : int(result.num_pages[row, head])]
            pages = -(-context_length[row] // size)
            always_kept = {0, pages - 2, pages - 1} if dropped_mass_limit[row] > 0 else set(range(pages))
            if (np.diff(kept) <= 0).any() or not always_kept <= set(kept.tolist()) or (kept >= pages).any():
                return np.inf
            left = np.setdiff1d(np.arange(pages), kept)
            if dropped_mass_limit[row] > 0 and not left.size:
                return np.inf
            missing = 1 - dropped_mass_limit[row] - weight[row, head, kept].sum()
            difference_of_mass = abs(float(result.dropped_mass[row, head]) - mass[row, head, left].sum())
            largest = max(largest, missing, difference_of_mass)
        return float(largest)

    return KernelCheck(paged_attention.SELECT_PAGES, (*arguments, size, rules), (6, 7), error, 1e-4)


def _topk_entropy(dtype: str) -> KernelCheck:
    case = topk_cases.Case(8, 5003, K, "ties", dtype)
    arguments = topk_cases.build(case)
    expected = topk_cases.exact(arguments, K)
    operands = jax.tree.map(jnp.asarray, tuple(arguments))
    return KernelCheck(
        topk_entropy.TOPK_ENTROPY, (operands[0], K, *operands[1:]), (1,), _differs_from(expected), FLOAT32
    )


def _project(dtype: str) -> KernelCheck:
    rng = np.random.default_rng(4)

    # Eighths: their products are exact in float32, so that ties are ties in every order of summation.
    def small(*shape):
        return (rng.integers(-8, 9, shape) / 8).astype(jnp.dtype(dtype))

    hidden, weight = small(4, 128), small(128, 3001)
    temperature, calibration = np.exp(rng.uniform(-1, 1, (2, 4))).astype(np.float32)
    logits = hidden.astype(np.float32) @ weight.astype(np.float32)
    expected = topk_cases.exact(topk_cases.Arguments(logits, temperature, calibration), K)
    arguments = tuple(map(jnp.asarray, (hidden, weight, temperature, calibration)))
    return KernelCheck(
        topk_entropy.PROJECT, (*arguments[:2], K, *arguments[2:]), (2,), _differs_from(expected), FLOAT32
    )


def _skinny_matmul(dtype: str) -> KernelCheck:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((3, 256)).astype(jnp.dtype(dtype))
    weights = tuple(rng.standard_normal((256, n)).astype(jnp.bfloat16) / 16 for n in (192, 64))
    expected = tuple(x.astype(np.float64) @ weight.astype(np.float64) for weight in weights)
    arguments = jax.tree.map(jnp.asarray, (x, weights))
    return KernelCheck(skinny_matmul.SKINNY_MATMUL, arguments, (), _differs_from(expected), _tolerance(dtype))


def _grouped_matmul(dtype: str) -> KernelCheck:
    rng = np.random.default_rng(12)
    sizes, first = np.array([3, 0, 70], np.int32), np.int32(1)
    x = rng.standard_normal((sizes.sum(), 128)).astype(jnp.dtype(dtype))
    weight = (rng.standard_normal((4, 128, 128)) / 12).astype(jnp.bfloat16)
    group = first + np.repeat(np.arange(3), sizes)
    expected = (np.einsum("ri,rio->ro", x.astype(np.float64), weight[group].astype(np.float64)),)
    arguments = jax.tree.map(jnp.asarray, (x, sizes, (weight,), (), first))
    return KernelCheck(
        grouped_matmul.GROUPED_MATMUL, arguments, (), _differs_from(expected), _tolerance(dtype)
    )


def _rms_norm(dtype: str) -> KernelCheck:
    rng = np.random.default_rng(7)
    x, weight = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in ((3, 200), (200,)))
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float64)
    arguments = (jnp.asarray(x), jnp.asarray(weight), 1e-5)
    return KernelCheck(rms_norm.RMS_NORM, arguments, (2,), _differs_from(expected), _tolerance(dtype))


def _silu_and_mul(dtype: str) -> KernelCheck:
    rng = np.random.default_rng(11)
    gate, up = (rng.standard_normal((3, 208)).astype(jnp.dtype(dtype)) for _ in range(2))
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up.astype(np.float64)
    arguments = jnp.asarray(gate), jnp.asarray(up)
    return KernelCheck(silu_and_mul.SILU_AND_MUL, arguments, (), _differs_from(expected), _tolerance(dtype))


def _longest_match() -> KernelCheck:
    text = np.tile(np.arange(50, dtype=np.int32), (3, 4))
    last = np.array([199, 120, 49], np.int32)
    expected = (np.array([8, 8, 0]), np.array([149, 70, 48]))
    return KernelCheck(
        longest_match.LONGEST_MATCH,
        (jnp.asarray(text), jnp.asarray(last), 8),
        (2,),
        _differs_from(expected),
        0,
    )


def _gumbel_argmax() -> KernelCheck:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((4, 5003)).astype(np.float32)
    temperature, seed = np.array([0.7, 0.0, 1.0, 2.0], np.float32), jnp.arange(4)
    keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(8), s), s + 1) for s in seed]
    bits = np.asarray([jax.random.bits(key, (5003,)) for key in keys], np.float64)
    noise = -np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))
    warm = temperature[:, None] > 0
    expected = np.where(warm, logits / np.where(warm, temperature[:, None], 1) + noise, logits).argmax(-1)
    key = jax.random.key_data(jax.random.key(8))
    arguments = jnp.asarray(logits), jnp.asarray(temperature), key, seed, seed + 1, jnp.ones(4, bool)
    return KernelCheck(gumbel_argmax.GUMBEL_ARGMAX, arguments, (), _differs_from(expected), 0)


def _entropy_moments() -> KernelCheck:
    logits = (3 * np.random.default_rng(6).standard_normal((4, 5003))).astype(np.float32)
    inverse = np.array([0.5, 1, 2, 1e9], np.float32)
    highest = logits.max(-1)
    distance = (logits.astype(np.float64) - highest[:, None]) * inverse[:, None]
    weight = np.exp(distance)
    p = weight / weight.sum(-1, keepdims=True)
    expected = (highest, np.log(weight.sum(-1)), (p * distance).sum(-1), (p * distance**2).sum(-1))
    arguments = jnp.asarray(logits), jnp.asarray(inverse), jnp.ones(4, bool)
    return KernelCheck(entropy_moments.ENTROPY_MOMENTS, arguments, (), _differs_from(expected), FLOAT32)
