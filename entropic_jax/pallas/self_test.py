"""Does what runs on this machine say what it should? A small case of every operation, against float64."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..devices import default_device
from . import entropy_moments, paged_attention, skinny_matmul, topk_entropy
from .dispatch import Operation
from .paged_attention import Rules, Summary
from .paged_attention import cases as paged_cases
from .paged_attention.reference import estimate
from .topk_entropy import cases as topk_cases

K = 40
QUERIES = 24  # of a row that is prefilled
FLOAT32, BFLOAT16 = 5e-5, 2e-2  # largest differences that rounding explains


class Trial(NamedTuple):
    """An operation on arguments, and how far a result is from the truth."""

    operation: Operation
    arguments: tuple[Any, ...]
    static: tuple[int, ...]  # which of the arguments a program is compiled for
    error: Callable[[Any], float]  # infinite where something else than a rounded number differs
    tolerance: float


class Finding(NamedTuple):
    """What became of one operation."""

    operation: str
    chosen: str | None  # the back end that serves
    declined: dict[str, str]  # back end: reason
    compile_seconds: float | None = None
    error: float | None = None
    tolerance: float | None = None
    problem: str | None = None  # None: all is well


def run() -> list[Finding]:
    """Every operation, compiled and run on the default device with what `ENTROPIC_KERNELS` asks for."""
    return [examine(trial) for trial in trials()]


def examine(trial: Trial) -> Finding:
    """Compile and run one operation; what goes wrong is said and not raised."""
    operation, arguments = trial.operation, trial.arguments
    try:
        candidates = operation.candidates()
        reasons = operation.decline_reasons(*arguments)
    except Exception as error:  # whatever it is, the other operations are to be looked at
        return Finding(operation.name, None, {}, problem=_said(error))
    declined = {name: reason for name, reason in reasons.items() if reason is not None}
    chosen = next((name for name in candidates if reasons[name] is None), None)
    if chosen is None:
        return Finding(operation.name, None, declined, problem="every back end declines")
    try:
        begin = time.perf_counter()
        # A function of its own: what was traced before under another name must not be found again.
        call = lambda *x: operation.backends[chosen](*x)
        program = jax.jit(call, static_argnums=trial.static).lower(*arguments).compile()
        seconds = time.perf_counter() - begin
        operands = [x for i, x in enumerate(arguments) if i not in trial.static]
        error = trial.error(jax.block_until_ready(program(*operands)))
    except Exception as failure:
        return Finding(operation.name, chosen, declined, problem=_said(failure))
    problem = None if error <= trial.tolerance else f"differs by {error:.2g}; accepted is {trial.tolerance:g}"
    return Finding(operation.name, chosen, declined, seconds, error, trial.tolerance, problem)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def trials() -> list[Trial]:
    """The operations in the type and with the shapes that the default device is used with."""
    dtype = "float32" if default_device().platform == "cpu" else "bfloat16"
    return [
        _decode(dtype),
        _prefill(dtype),
        _write(dtype),
        _choose(),
        _topk_entropy(dtype),
        _project(dtype),
        _few_rows(dtype),
        _moments(),
    ]


def difference(found: Any, expected: Any) -> float:
    """The largest difference of any two numbers; infinite where integers or what is finite disagree."""
    largest = 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.shape != y.shape:
            return np.inf
        if not jnp.issubdtype(x.dtype, jnp.floating):
            if not np.array_equal(x, y):
                return np.inf
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        some = np.isfinite(y)
        if not np.array_equal(x[~some], y[~some], equal_nan=True):
            return np.inf
        apart = np.abs(x[some] - y[some]) / np.maximum(1.0, np.abs(y[some]))
        if np.isnan(apart).any():
            return np.inf
        largest = max(largest, float(apart.max(initial=0.0)))
    return largest


def _decode(dtype: str) -> Trial:
    case = paged_cases.Case(4, 2, 4, 128, 64, 6, kept=0.6, window=True, dtype=dtype)
    arguments = paged_cases.build(case)
    expected = paged_cases.exact(case, arguments)
    given = jax.tree.map(jnp.asarray, tuple(arguments))
    error = lambda found: difference(tuple(found), expected)
    return Trial(paged_attention.DECODE, given, (), error, FLOAT32 if dtype == "float32" else BFLOAT16)


def _prefill(dtype: str) -> Trial:
    case = paged_cases.Case(2, 2, 4, 128, 64, 4, kept=0.6, dtype=dtype)
    given = paged_cases.build(case)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((*given.q.shape[:3], QUERIES, case.head_dim)) * case.head_dim**-0.5
    q = q.astype(given.q.dtype)
    query = np.maximum(given.last - QUERIES, 0).astype(np.int32)
    first = np.zeros((case.rows, QUERIES), np.int32)
    expected = np.zeros(q.shape)
    for i in range(QUERIES):
        seen = given._replace(q=q[:, :, :, i], last=np.minimum(query + i + 1, given.last))
        expected[:, :, :, i] = paged_cases.exact(case, seen)[0]
    arguments = (q, given.keys, given.values, given.table, given.index, given.count, first, query, given.last)
    error = lambda found: difference(found, expected)
    tolerance = FLOAT32 if dtype == "float32" else BFLOAT16
    return Trial(paged_attention.PREFILL, jax.tree.map(jnp.asarray, arguments), (), error, tolerance)


def _write(dtype: str) -> Trial:
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
    # The last page is a bin, of which nothing is asked.
    cut = lambda pools: [np.asarray(x)[:-1] for x in jax.tree.leaves(pools)]
    expected = cut((tiles, summaries))
    error = lambda found: difference(cut(found), expected)
    return Trial(paged_attention.WRITE, arguments, (), error, FLOAT32)


def _choose() -> Trial:
    rng = np.random.default_rng(3)
    rows, kv_heads, group, head_dim, size, most = 2, 2, 4, 128, 16, 24
    pool = rows * most + 1
    keys = rng.standard_normal((pool, kv_heads, size, head_dim)).astype(np.float32)
    summary = Summary(keys.min(2), keys.max(2), keys.sum(2))
    q = rng.standard_normal((rows, kv_heads, group, head_dim)).astype(np.float32) / 3
    information = rng.uniform(0.5, 2, (pool, kv_heads)).astype(np.float32)
    table = rng.permutation(pool - 1).reshape(rows, most).astype(np.int32)
    last = np.array([most * size, most * size - 37], np.int32)
    dropped_mass_limit = np.array([0.3, 0.0], np.float32)
    rules = Rules()
    arguments = jax.tree.map(jnp.asarray, (q, summary, information, table, last, dropped_mass_limit))
    estimated = estimate(q, summary, information, table, last, size, rules)
    mass, weight = np.asarray(estimated.mass), np.asarray(estimated.weight)

    def error(found: Any) -> float:
        worst = 0.0
        for row, head in np.ndindex(rows, kv_heads):
            kept = np.asarray(found.index)[row, head, : int(found.count[row, head])]
            pages = -(-last[row] // size)
            must = {0, pages - 2, pages - 1} if dropped_mass_limit[row] > 0 else set(range(pages))
            if (np.diff(kept) <= 0).any() or not must <= set(kept.tolist()) or (kept >= pages).any():
                return np.inf
            left = np.setdiff1d(np.arange(pages), kept)
            if dropped_mass_limit[row] > 0 and not left.size:
                return np.inf
            short = 1 - dropped_mass_limit[row] - weight[row, head, kept].sum()
            apart = abs(float(found.dropped[row, head]) - mass[row, head, left].sum())
            worst = max(worst, short, apart)
        return float(worst)

    return Trial(paged_attention.CHOOSE, (*arguments, size, rules), (6, 7), error, 1e-4)


def _topk_entropy(dtype: str) -> Trial:
    case = topk_cases.Case(8, 5003, K, "ties", dtype)
    arguments = topk_cases.build(case)
    expected = topk_cases.exact(arguments, K)
    given = jax.tree.map(jnp.asarray, tuple(arguments))
    error = lambda found: difference(found, expected)
    return Trial(topk_entropy.TOPK_ENTROPY, (given[0], K, *given[1:]), (1,), error, FLOAT32)


def _project(dtype: str) -> Trial:
    rng = np.random.default_rng(4)
    # Eighths, whose products are exact in float32: ties are ties in every order of summation.
    small = lambda *shape: (rng.integers(-8, 9, shape) / 8).astype(jnp.dtype(dtype))
    hidden, weight = small(4, 128), small(128, 3001)
    temperature, calibration = np.exp(rng.uniform(-1, 1, (2, 4))).astype(np.float32)
    logits = hidden.astype(np.float32) @ weight.astype(np.float32)
    expected = topk_cases.exact(topk_cases.Arguments(logits, temperature, calibration), K)
    arguments = tuple(map(jnp.asarray, (hidden, weight, temperature, calibration)))
    error = lambda found: difference(found, expected)
    return Trial(topk_entropy.PROJECT, (*arguments[:2], K, *arguments[2:]), (2,), error, FLOAT32)


def _few_rows(dtype: str) -> Trial:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((3, 256)).astype(jnp.dtype(dtype))
    weights = tuple(rng.standard_normal((256, n)).astype(jnp.bfloat16) / 16 for n in (192, 64))
    expected = tuple(x.astype(np.float64) @ weight.astype(np.float64) for weight in weights)
    arguments = jax.tree.map(jnp.asarray, (x, weights))
    error = lambda found: difference(found, expected)
    return Trial(
        skinny_matmul.SKINNY_MATMUL, arguments, (), error, FLOAT32 if dtype == "float32" else BFLOAT16
    )


def _moments() -> Trial:
    logits = (3 * np.random.default_rng(6).standard_normal((4, 5003))).astype(np.float32)
    inverse = np.array([0.5, 1, 2, 1e9], np.float32)
    highest = logits.max(-1)
    distance = (logits.astype(np.float64) - highest[:, None]) * inverse[:, None]
    weight = np.exp(distance)
    share = weight / weight.sum(-1, keepdims=True)
    expected = (highest, np.log(weight.sum(-1)), (share * distance).sum(-1), (share * distance**2).sum(-1))
    error = lambda found: difference(tuple(found), expected)
    return Trial(
        entropy_moments.ENTROPY_MOMENTS, (jnp.asarray(logits), jnp.asarray(inverse)), (), error, FLOAT32
    )
