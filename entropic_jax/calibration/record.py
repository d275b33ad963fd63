"""Calibration record: the result of a calibration, and its JSON file next to the model."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

FILE = "calibration.json"
VERSION = 2
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # of the quantiles


class Calibration(NamedTuple):
    """Statistics of a model on calibration text; entropies and losses in nats.

    H₁ is the entropy of the belief softmax(z / T_cal); the plain entropy is that of softmax(z).
    """

    temperature: float  # T_cal
    tokens: int  # number of predicted tokens
    loss: float  # mean −ln p(token) of softmax(z)
    calibrated_loss: float  # mean −ln p(token) of softmax(z / T_cal)
    error: float  # expected calibration error of softmax(z), in [0, 1]
    calibrated_error: float  # expected calibration error of softmax(z / T_cal)
    quantiles: tuple[float, ...]  # of H₁, at LEVELS
    plain_quantiles: tuple[float, ...]  # of the plain entropy, at LEVELS
    varentropy_quantiles: tuple[float, ...]  # of V₁, at LEVELS, in nats²
    target_entropy: float  # temperature law: H*, the median of H₁
    low_entropy: float  # pruning law: H_lo, the lower quartile of H₁
    high_entropy: float  # pruning law: H_hi, the upper quartile of H₁
    mean: float  # scheduling law: μ of the AR(1) process that H₁ follows along a text
    scale: float  # σ of its innovations H₁[t+1] − μ − ρ (H₁[t] − μ)
    correlation: float  # ρ, in [−0.999, 0.999]


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Writes a calibration as JSON to a file, or as `calibration.json` into a directory, atomically."""
    file = _file(path)
    tree: dict[str, Any] = {"version": VERSION}
    for name, value in calibration._asdict().items():
        named = isinstance(value, tuple)
        tree[name] = dict(zip(map(str, LEVELS), map(_short, value), strict=True)) if named else _short(value)
    text = json.dumps(tree, indent=2, allow_nan=False) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{FILE}.", delete=False) as stream:
        stream.write(text)
    os.chmod(stream.name, 0o644)
    os.replace(stream.name, file)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _file(path: str | Path) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def load_calibration(path: str | Path) -> Calibration:
    """Load what `save_calibration` wrote, from a file or from a model's directory.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if the file is invalid; names the file, the field, what it must be and its value.
    """
    file = _file(path)
    if not file.is_file():
        raise FileNotFoundError(f"path must be a file written by `entropic calibrate`; {file} does not exist")
    try:
        tree = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{file} must hold a JSON object; got {type(tree).__name__}")
    if tree.get("version") != VERSION:
        raise ValueError(f"{file}: version must be {VERSION}; got {tree.get('version')!r}")
    odd = {*tree} ^ {"version", *Calibration._fields}
    if odd:
        name = min(odd)
        fields = ", ".join(Calibration._fields)
        fault = f"{name} is unknown" if name in tree else f"{name} is missing"
        raise ValueError(f"{file} must have exactly the fields version, {fields}; {fault}")
    return Calibration(**{name: _checked(file, name, tree) for name in Calibration._fields})


def _checked(file: Path, name: str, tree: dict[str, Any]) -> Any:
    value = tree[name]

    def number(x):
        return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)

    if name.endswith("quantiles"):
        levels = [str(level) for level in LEVELS]
        complete = isinstance(value, dict) and list(value) == levels and all(map(number, value.values()))
        value = tuple(value.values()) if complete else ()
        right = complete and all(low <= high for low, high in zip((0, *value), value, strict=False))
        requirement = f"ascending numbers of at least 0 for {', '.join(levels)}"
    elif name == "tokens":
        right, requirement = (
            isinstance(value, int) and number(value) and value > 0,
            "an integer of at least 1",
        )
    elif name == "temperature":
        right, requirement = number(value) and value > 0, "a number above 0"
    elif name == "correlation":
        right, requirement = number(value) and abs(value) < 1, "a number in (−1, 1)"
    elif name == "high_entropy":
        low = tree["low_entropy"]
        right, requirement = (
            number(value) and number(low) and value > low,
            f"a number above low_entropy, {low!r}",
        )
    else:
        right, requirement = number(value) and value >= 0, "a number of at least 0"
    if not right:
        raise ValueError(f"{file}: {name} must be {requirement}; got {tree[name]!r}")
    return value
