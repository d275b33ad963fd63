"""Test cases for every back end of `topk_entropy`, and their exact results in float64."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .reference import Head, Moments, TopkEntropy


class Case(NamedTuple):
    """A shape and the kind of its logits."""

    rows: int
    vocabulary: int
    k: int
    kind: str = "normal"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """The name of the case, for pytest."""
        return f"{self.rows}x{self.vocabulary}-k{self.k}-{self.kind}-{self.dtype}"


class Arguments(NamedTuple):
    """The arguments of `topk_entropy` but k, as NumPy arrays."""

    logits: np.ndarray
    temperature: np.ndarray
    calibration: np.ndarray


# Small enough for an interpreter. All vocabularies but one are ragged: no multiple of a kernel's blocks.
SMALL = (
    Case(3, 700, 5),
    Case(9, 300, 128, "ties"),
    Case(1, 129, 1, "normal", "bfloat16"),
    Case(2, 1100, 40, "crowded"),
    Case(4, 640, 128, "sorted", "bfloat16"),
    Case(5, 517, 7, "masked"),
    Case(6, 411, 33, "special"),
    Case(2, 900, 128, "far", "bfloat16"),
    Case(2, 130, 128, "peaked"),
    Case(2, 5001, 64, "ties"),
)

# Vocabularies of real models, for compilers and hardware: too large for an interpreter.
LARGE = (
    Case(1, 128256, 64, dtype="bfloat16"),
    Case(8, 50257, 50),
    Case(12, 151936, 20, dtype="bfloat16"),
    Case(64, 128256, 1),
    Case(64, 128256, 64, dtype="bfloat16"),
    Case(64, 262144, 128),
    Case(256, 32000, 8, dtype="bfloat16"),
)


def build(case: Case, seed: int = 0) -> Arguments:
    """The arguments of one case; the first row samples at temperature 1, the last is greedy."""
    rng = np.random.default_rng(seed)
    shape = (case.rows, case.vocabulary)
    logits = 3 * rng.standard_normal(shape)
    index = np.arange(case.vocabulary)
    if case.kind == "ties":
        logits = np.round(logits / 3)
        logits[0] = -2.5
    elif case.kind == "crowded":  # the largest all fall into one or two buckets
        logits = np.where(index % 128 == 17, 9 + logits, logits)
        logits[-1] = np.where(index % 256 == 40, 20 - index / 256, logits[-1])
    elif case.kind == "sorted":
        logits = np.sort(logits, axis=-1)
        logits[::2] = logits[::2, ::-1]
    elif case.kind == "masked":  # down to fewer than k, to one, and to the most negative number
        kept = rng.random(shape) < np.linspace(0.5, 0.004, case.rows)[:, None]
        kept[:, case.vocabulary // 2] = True
        logits = np.where(kept, logits, -np.inf)
        logits[0] = np.where(kept[0], logits[0], np.finfo(np.float32).min)
        logits[-1] = np.where(index == 400, 1.0, -np.inf)
    elif case.kind == "special":  # an ordinary row; then NaN, +inf, all masked, zeros of both signs
        logits[1, [0, 9, -1]] = np.nan
        logits[2, case.vocabulary - 1] = np.inf
        logits[3] = -np.inf
        logits[4] = np.where(index % 2 == 0, -0.0, 0.0)
        logits[5, : case.vocabulary - 3] = -np.inf
    elif case.kind == "far":  # from zero: the largest come last, or first
        logits += 3e4
        logits[0, -9:] += 2e4
        logits[1, :9] += 2e4
    elif case.kind == "peaked":
        logits[0] = np.where(index == 77, 60.0, logits[0])
        logits[1] = np.where(index == 129, 3e38, -3e38)
    temperature = np.exp(rng.uniform(-2, 1, case.rows))
    temperature[0] = 1
    if case.rows > 1:
        temperature[-1] = 0
    calibration = np.exp(rng.uniform(-0.5, 0.5, case.rows))
    logits = logits.astype(jnp.dtype(case.dtype))
    return Arguments(logits, *(x.astype(np.float32) for x in (temperature, calibration)))


def exact(arguments: Arguments, k: int) -> TopkEntropy:
    """The result in float64, by its definition."""
    logits = arguments.logits.astype(np.float64)
    rows, vocabulary = logits.shape
    candidates = np.where(np.isnan(logits), -np.inf, logits)
    # A stable sort keeps ties in order; adding 0 turns −0 into +0.
    indices = np.argsort(-(candidates + 0.0), axis=-1, kind="stable")[:, :k]
    values: Any = np.take_along_axis(candidates, indices, axis=-1)

    def moments(z: Any, temperature: Any) -> Moments:
        return Moments(*np.transpose([_moments(*pair) for pair in zip(z, temperature, strict=True)]))

    calibration = arguments.calibration.astype(np.float64)
    head: Any = np.array([_head(*of) for of in zip(logits, values, calibration, strict=True)]).T
    token: Any = np.where(values > -np.inf, indices, vocabulary)
    others: Any = np.full(rows, vocabulary - k)
    return TopkEntropy(
        values=values,
        indices=token,
        calibrated=moments(logits, calibration),
        tempered=moments(logits, arguments.temperature.astype(np.float64)),
        head=Head(head[0], head[1], head[2], head[3], others),
    )


def _log_normaliser(scaled: np.ndarray) -> float:
    # Of numbers in any order, with exp(−inf) = 0.
    highest = scaled.max()
    return highest + np.log(np.exp(scaled - highest).sum())


def _moments(logits: np.ndarray, temperature: float) -> tuple[float, float, float]:
    if np.isnan(logits).any():
        return (np.nan,) * 3
    if not np.isfinite(logits.max()):
        return logits.max(), np.nan, np.nan
    if temperature == 0:
        return (0.0,) * 3
    scaled = logits[logits > -np.inf] / temperature
    normaliser = _log_normaliser(scaled)
    information = normaliser - scaled
    p = np.exp(-information)
    seen = p > 0  # the information of a token without probability may be infinite
    entropy = (p * information)[seen].sum()
    return normaliser, entropy, (p[seen] * (information[seen] - entropy) ** 2).sum()


def _head(logits: np.ndarray, values: np.ndarray, temperature: float) -> tuple[float, ...]:
    if not np.isfinite(logits.max()):
        return (np.nan,) * 4
    scaled = values[values > -np.inf] / temperature
    normaliser = _log_normaliser(logits[logits > -np.inf] / temperature)
    rest = np.sort(logits)[: logits.size - values.size] / temperature
    tail = np.exp(rest - normaliser).sum()
    mass = np.exp(scaled - normaliser).sum()
    least = np.exp(values[-1] / temperature - normaliser)
    return mass, tail, _moments(values, temperature)[1], least
